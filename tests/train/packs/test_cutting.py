from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.delta import common_prefix
from stepgym.train.packs.cutting import PACK_COST, PrefixOrder, best_cut, cut, prefix_order, small_first
from stepgym.train.packs.cutting import nodes as nodes_of

paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=7)


def nodes(chosen: list[list[int]]) -> int:
    """Nodes of a forest: the distinct prefixes."""
    return len({tuple(path[: n + 1]) for path in chosen for n in range(len(path))})


def fits(chosen: list[list[int]], budget: int) -> bool:
    """Whether they may share a pack: within the budget, or no more than the first of them."""
    return nodes(chosen) <= max(budget, len(chosen[0]))


def ordered(made: list[list[int]], key: list[int] | None = None) -> PrefixOrder:
    return prefix_order([np.array(path, dtype=np.int32) for path in made], key or [0] * len(made))


@given(paths)
def test_what_each_path_adds_to_the_one_before_makes_the_distinct_prefixes(made: list[list[int]]) -> None:
    order = ordered(made)
    assert sorted(order.order.tolist()) == list(range(len(made)))
    assert [len(made[i]) for i in order.order] == order.length.tolist()
    assert int((order.length - order.shared).sum()) == nodes(made)


@given(paths, st.data())
def test_paths_of_different_keys_share_nothing(made: list[list[int]], data: st.DataObject) -> None:
    key = [data.draw(st.integers(0, 2)) for _ in made]
    order = ordered(made, key)
    expected = sum(nodes([path for path, k in zip(made, key, strict=True) if k == own]) for own in set(key))
    assert int((order.length - order.shared).sum()) == expected


@settings(max_examples=60, deadline=None)
@given(paths, st.integers(1, 20))
def test_cuts_keep_to_the_budget_and_no_other_cuts_cost_less(made: list[list[int]], budget: int) -> None:
    order = ordered(made)
    sequence = [made[i] for i in order.order]
    ranges = cut(order, budget)
    assert [i for start, end in ranges for i in range(start, end)] == list(range(len(made)))
    for start, end in ranges:
        assert fits(sequence[start:end], budget)

    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum(nodes(sequence[start:end]) + PACK_COST for start, end in cuts)

    inner = range(1, len(made))
    every = [
        list(zip((0, *marks), (*marks, len(made)), strict=True))
        for size in range(len(made))
        for marks in combinations(inner, size)
    ]
    allowed = [cuts for cuts in every if all(fits(sequence[start:end], budget) for start, end in cuts)]
    assert cost(ranges) == min(map(cost, allowed), default=0)


def test_a_path_over_the_budget_goes_alone() -> None:
    order = ordered([[1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 9]])
    lengths = [sum(order.length[start:end].tolist()) for start, end in cut(order, 4)]
    assert 6 in lengths


@given(paths)
def test_the_other_order_holds_the_same_paths_and_shares_as_much(made: list[list[int]]) -> None:
    order = ordered(made)
    other = small_first(order)
    assert sorted(other.order.tolist()) == sorted(order.order.tolist())
    sequence = [made[i] for i in other.order]
    assert other.length.tolist() == [len(path) for path in sequence]
    for rank, (before, now) in enumerate(pairwise(sequence), start=1):
        assert other.shared[rank] == common_prefix(np.array(before), np.array(now))
    assert int((other.length - other.shared).sum()) == nodes(made)


def test_side_branches_are_cut_off_with_what_is_before_them() -> None:
    """Turns whose end is stripped from history: a long line with a short side branch at every turn."""
    line = list(range(100, 160))
    made = [[*line[:n], 7, 8, 9] for n in range(10, 61, 10)]
    made += [[*line[:n], 5, 6] for n in range(10, 61, 10)]
    order = ordered(made)
    for budget in (66, 70, 80):
        chosen, ranges = best_cut(order, budget)
        total = nodes_of(chosen, ranges)
        assert total <= nodes_of(order, cut(order, budget))
        assert sorted(i for start, end in ranges for i in chosen.order[start:end]) == list(range(len(made)))
    assert nodes_of(*best_cut(order, 1000)) == nodes(made)
