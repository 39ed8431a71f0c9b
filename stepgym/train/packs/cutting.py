"""Paths in prefix order, and where to cut them into packs: what a cut costs is the prefix that is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepgym.record.delta import common_prefix
from stepgym.record.step import Ids

PACK_COST = 64
"""What one more pack costs besides its tokens, in tokens: launching its operations."""


class PrefixOrder(NamedTuple):
    """Paths sorted so that what shares a prefix stands together. P paths.

    Attributes:
        order: int64 [P], path numbers in sorted order.
        length: int64 [P], tokens of each, in that order.
        shared: int64 [P], leading tokens that each shares with the one before it; 0 for the first.
    """

    order: NDArray[np.int64]
    length: NDArray[np.int64]
    shared: NDArray[np.int64]


def prefix_order(paths: Sequence[Ids], key: Sequence[int]) -> PrefixOrder:
    """Sort paths by their ids. Only paths of one key share anything.

    Linear in the tokens: big-endian bytes sort as the ids do, by one comparison of memory each.

    Args:
        paths: int32 arrays of ids.
        key: A number for each.
    """
    texts = [np.concatenate([[k], ids]).astype(">i4").tobytes() for ids, k in zip(paths, key, strict=True)]
    order = sorted(range(len(paths)), key=texts.__getitem__)
    length = np.array([len(paths[i]) for i in order], dtype=np.int64)
    shared = np.zeros(len(paths), dtype=np.int64)
    for rank in range(1, len(order)):
        before, now = order[rank - 1], order[rank]
        if key[before] == key[now]:
            shared[rank] = common_prefix(paths[before], paths[now])
    return PrefixOrder(np.array(order, dtype=np.int64), length, shared)


def cut(order: PrefixOrder, budget: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of the sorted paths, each a pack of at most `budget` nodes, of least cost together.

    A range costs the nodes of its forest, plus `PACK_COST`; a path longer than the budget goes alone. By dynamic
    programming over where packs start: cutting before a path computes again exactly what it shares with the one before
    it.
    """
    count = len(order.length)
    # nodes of a range: its first path whole, then what each next one adds
    added = np.concatenate([[0], np.cumsum(order.length - order.shared)])
    cost = np.full(count + 1, np.inf)
    origin = np.zeros(count + 1, dtype=np.int64)
    cost[0] = 0.0
    for start in range(count):
        base = order.shared[start] - added[start]
        last = int(np.searchsorted(added, budget - base, side="right")) - 1
        ends = np.arange(start + 1, max(start + 1, last) + 1)
        through = cost[start] + PACK_COST + base + added[ends]
        # Of equal costs the later start wins: packs are then filled from the front.
        better = through < cost[ends]
        cost[ends[better]] = through[better]
        origin[ends[better]] = start
    ranges: list[tuple[int, int]] = []
    end = count
    while end > 0:
        ranges.append((int(origin[end]), end))
        end = int(origin[end])
    return ranges[::-1]
