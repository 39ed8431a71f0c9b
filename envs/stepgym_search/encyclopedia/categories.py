"""The classes of things that articles are about."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

Category: TypeAlias = Literal["person", "town", "region", "organisation", "work"]

CATEGORIES: tuple[Category, ...] = get_args(Category)

WORLD_SIZE = 20
"""Articles in a world."""

SLOTS: Mapping[Category, range] = MappingProxyType(
    {
        "person": range(0, 6),
        "town": range(6, 10),
        "region": range(10, 12),
        "organisation": range(12, 15),
        "work": range(15, 20),
    }
)
"""Which of a world's articles are about what."""

NOUNS: Mapping[Category, tuple[str, ...]] = MappingProxyType(
    {
        "person": ("architect", "astronomer", "botanist", "engraver", "historian", "inventor", "musician", "painter",
                   "physician", "poet", "surveyor", "weaver"),
        "town": ("city", "fishing village", "harbour town", "market town", "mining town", "town"),
        "region": ("county", "duchy", "island", "province", "region", "territory"),
        "organisation": ("association", "company", "house of learning", "institution", "organisation", "society"),
        "work": ("ballad", "chronicle", "comedy", "essay", "novel", "opera", "poem", "tragedy"),
    }
)  # fmt: skip

PLAIN_NOUNS: Mapping[Category, str] = MappingProxyType(
    {"person": "person", "town": "town", "region": "region", "organisation": "company", "work": "book"}
)
"""What entities are where the wording is plain."""

EPITHETS: Mapping[Category, tuple[str, ...]] = MappingProxyType(
    {
        "person": ("Fox", "Heron", "Otter", "Raven", "Stag", "Swan"),
        "town": ("Jewel", "Key", "Gate", "Lantern"),
        "region": ("Granary", "Shield"),
        "organisation": ("Hope", "Pride", "Treasure"),
        "work": ("Dream", "Farewell", "Lament", "Vision", "Whisper"),
    }
)
"""What other names of the form "the Fox of ..." are made with: one for each entity of a class in a world."""
