"""A fictional encyclopedia, made from a seed, and questions about it whose golden answers its articles prove."""

from __future__ import annotations

from stepgym_search.encyclopedia.candidates import KINDS
from stepgym_search.encyclopedia.config import EncyclopediaConfig
from stepgym_search.encyclopedia.file import articles, encyclopedia_file
from stepgym_search.encyclopedia.questions import QUESTIONS_PER_WORLD, GeneratedQuestions
from stepgym_search.encyclopedia.relations import RELATIONS
from stepgym_search.encyclopedia.splits import SPLITS

__all__ = [
    "KINDS",
    "QUESTIONS_PER_WORLD",
    "RELATIONS",
    "SPLITS",
    "EncyclopediaConfig",
    "GeneratedQuestions",
    "articles",
    "encyclopedia_file",
]
