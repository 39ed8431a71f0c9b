"""Rows of differing lengths, cut into batches that waste little on padding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MICRO_BATCH_COST = 256
"""What one more micro-batch costs besides its tokens, in tokens: launching its operations."""


def cut_by_length(lengths: NDArray[np.int64], budget: int) -> list[tuple[int, int]]:
    """Cut lengths, which must fall, into ranges [start, end) of least cost.

    A range costs its first (longest) length times its size, plus `MICRO_BATCH_COST`; none costs more than `budget`
    tokens unless it holds a single length. By dynamic programming over the first rows.
    """
    count = len(lengths)
    cost = np.full(count + 1, np.inf)
    cut = np.zeros(count + 1, dtype=np.int64)
    cost[0] = 0.0
    for start in range(count):
        longest = int(lengths[start])
        most = min(count - start, max(1, budget // longest))
        ends = np.arange(start + 1, start + most + 1)
        through = cost[start] + longest * (ends - start) + MICRO_BATCH_COST
        better = through < cost[ends]
        cost[ends[better]] = through[better]
        cut[ends[better]] = start
    ranges: list[tuple[int, int]] = []
    end = count
    while end > 0:
        ranges.append((int(cut[end]), end))
        end = int(cut[end])
    return ranges[::-1]
