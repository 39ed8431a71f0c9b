"""Chance that depends on what it is for: the same on every machine and in every version of Python."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TypeVar

from stepgym.seeds import derive_seed

T = TypeVar("T")

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_ROUNDS = 4


def mix(value: int) -> int:
    """A number in [0, 2**64) that looks unrelated to `value`: the last step of SplitMix64 (Steele et al. 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Stream:
    """A stream of random numbers (SplitMix64), seeded with the parts that say what it is for."""

    __slots__ = ("_state",)

    def __init__(self, *parts: object) -> None:
        self._state = derive_seed("encyclopedia", *parts)

    def below(self, size: int) -> int:
        """A number in [0, size)."""
        self._state = (self._state + _STRIDE) & _MASK
        return (mix(self._state) * size) >> 64

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """The options in another order (Fisher and Yates)."""
        order = list(options)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def permute(number: int, size: int, key: int) -> int:
    """Where a permutation of [0, size), chosen by `key`, takes `number`: no two numbers meet.

    A Feistel network over pairs of digits near the square root of `size`, walked until it lands below `size`
    (Black and Rogaway 2002); needs no table, so a million names need no memory.
    """
    side = isqrt(size - 1) + 1
    other = -(-size // side)
    while True:
        high, low = divmod(number, other)
        for turn in range(_ROUNDS):
            if turn % 2:
                low = (low + mix(key + _STRIDE * (turn + 1) + high)) % other
            else:
                high = (high + mix(key + _STRIDE * (turn + 1) + low)) % side
        number = high * other + low
        if number < size:
            return number
