"""Paths in prefix order, and where to cut them into packs: what a cut costs is the prefix that is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def small_first(order: PrefixOrder) -> PrefixOrder:
    """The same paths with the smaller subtrees of every branch before the larger ones; still what shares together.

    A cut costs what the paths on both its sides share, so it should fall where large subtrees part: side branches are
    kept with what is before them.
    """
    added = _added(order)
    ranks: list[int] = []
    shared: list[int] = []
    waiting = [(0, len(order.length), 0)] if len(order.length) else []  # a range, and what its first path shares
    while waiting:
        start, end, before = waiting.pop()
        if end - start == 1:
            ranks.append(start)
            shared.append(before)
            continue
        stem = int(order.shared[start + 1 : end].min())
        marks = [start, *(start + 1 + np.flatnonzero(order.shared[start + 1 : end] == stem)).tolist(), end]
        parts = [(int(added[b] - added[a] + order.shared[a]), a, b) for a, b in pairwise(marks)]
        parts.sort(reverse=True)  # the last one is taken first
        waiting += [(a, b, stem) for _, a, b in parts[:-1]] + [(*parts[-1][1:], before)]
    return PrefixOrder(order.order[ranks], order.length[ranks], np.array(shared, dtype=np.int64))


def best_cut(order: PrefixOrder, budget: int) -> tuple[PrefixOrder, list[tuple[int, int]]]:
    """The better of the sorted order and `small_first`, and its cuts."""
    ranges = cut(order, budget)
    if len(ranges) < 2:
        return order, ranges
    other = small_first(order)
    others = cut(other, budget)
    return min(((order, ranges), (other, others)), key=lambda found: (nodes(*found), len(found[1])))


def nodes(order: PrefixOrder, ranges: Sequence[tuple[int, int]]) -> int:
    """Nodes of all ranges together."""
    added = _added(order)
    return sum(int(added[end] - added[start] + order.shared[start]) for start, end in ranges)


def _added(order: PrefixOrder) -> NDArray[np.int64]:
    """int64 [P + 1]: how many nodes the first paths have together, each adding what it does not share."""
    return np.concatenate([[0], np.cumsum(order.length - order.shared)])


def cut(order: PrefixOrder, budget: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of the sorted paths, each a pack of at most `budget` nodes, of least cost together.

    A range costs the nodes of its forest, plus `PACK_COST`; a path longer than the budget shares its pack with nothing
    but its own prefixes and equals. By dynamic
    programming over where packs start: cutting before a path computes again exactly what it shares with the one before
    it.
    """
    count = len(order.length)
    added = _added(order)
    cost = np.full(count + 1, np.inf)
    origin = np.zeros(count + 1, dtype=np.int64)
    cost[0] = 0.0
    for start in range(count):
        base = order.shared[start] - added[start]  # the first path of a pack shares nothing
        # A path over the budget goes alone, or with others that add nothing to it.
        most = max(budget - base, added[start + 1])
        last = int(np.searchsorted(added, most, side="right")) - 1
        ends = np.arange(start + 1, last + 1)
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
