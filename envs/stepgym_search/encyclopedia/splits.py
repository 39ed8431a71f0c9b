"""Which worlds are for training, for validation and for the test."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from stepgym.seeds import derive_seed

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_BLOCK = 10


def split_of(world: int) -> Split:
    """The split that a world belongs to, whatever the encyclopedia's seed and size.

    Of every ten worlds in a row one is for the test and one for validation; which ones is drawn.
    """
    block, place = divmod(world, _BLOCK)
    test, validation = _held_out(block)
    return "test" if place == test else "validation" if place == validation else "train"


def worlds_in(split: str, worlds: int) -> int:
    """How many of the first `worlds` worlds belong to a split."""
    blocks, rest = divmod(worlds, _BLOCK)
    per_block = _BLOCK - 2 if split == "train" else 1
    return blocks * per_block + sum(split_of(blocks * _BLOCK + place) == split for place in range(rest))


def world_of(split: str, number: int) -> int:
    """The world with that number, from 0, among those of a split."""
    block, place = divmod(number, _BLOCK - 2 if split == "train" else 1)
    test, validation = _held_out(block)
    if split != "train":
        return block * _BLOCK + (test if split == "test" else validation)
    for held_out in sorted((test, validation)):
        place += place >= held_out
    return block * _BLOCK + place


@lru_cache(maxsize=1 << 14)
def _held_out(block: int) -> tuple[int, int]:
    draw = derive_seed("encyclopedia split", block)
    test = draw % _BLOCK
    validation = (test + 1 + draw // _BLOCK % (_BLOCK - 1)) % _BLOCK
    return test, validation
