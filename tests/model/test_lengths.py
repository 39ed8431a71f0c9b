from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepgym.model.lengths import MICRO_BATCH_COST, cut_by_length


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 1000))
def test_cuts_cover_everything_once_keep_to_the_budget_and_cost_no_more_than_greedy(
    lengths: list[int], budget: int
) -> None:
    falling = np.array(sorted(lengths, reverse=True), dtype=np.int64)
    ranges = cut_by_length(falling, budget)
    assert [i for start, end in ranges for i in range(start, end)] == list(range(len(lengths)))
    cost = 0
    for start, end in ranges:
        assert end - start == 1 or falling[start] * (end - start) <= budget
        cost += falling[start] * (end - start) + MICRO_BATCH_COST
    greedy, start = 0, 0
    while start < len(falling):
        size = min(len(falling) - start, max(1, budget // int(falling[start])))
        greedy += int(falling[start]) * size + MICRO_BATCH_COST
        start += size
    assert cost <= greedy
