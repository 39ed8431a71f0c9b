"""Whether two results are the same answer.

Rows are compared as a multiset, or in order where the outermost gold query orders them. Order is required up to ties
in the gold query's ORDER BY keys: rows that tie may come in any order. Column order matters, column names do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from stepgym_sql.pool import Row, Value

TOLERANCE = 1e-6
_MATCHED_ROWS = 1_000


def same_value(left: Value, right: Value) -> bool:
    """Whether two cells are equal.

    NULL equals NULL. Whole numbers are equal when they are the same number, `2` and `2.0` included. Where one has a
    fraction, they are equal when they differ by at most 1e-6 plus 1e-6 of the larger one. Text and blobs are equal
    when they are identical; a number never equals its text.
    """
    if isinstance(left, int | float) and isinstance(right, int | float):
        if left == right:
            return True
        if _is_whole(left) and _is_whole(right):
            return False
        # Infinities are equal only to themselves, which has been decided above.
        return abs(left - right) <= TOLERANCE + TOLERANCE * max(abs(left), abs(right)) < float("inf")
    return type(left) is type(right) and left == right


def same_row(left: Row, right: Row) -> bool:
    """Whether two rows have equal cells, in order."""
    return len(left) == len(right) and all(map(same_value, left, right))


def same_multiset(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Whether the rows can be paired off so that every pair is equal; duplicates count.

    Exact up to 1,000 rows that share their text and NULLs; beyond that, rows are paired in sorted order.
    """
    if len(left) != len(right):
        return False
    if left == right or Counter(left) == Counter(right):
        return True
    if all(map(same_row, sorted(left, key=_sort_key), sorted(right, key=_sort_key))):
        return True
    # Sorting pairs rows wrongly when numbers that are nearly equal sort differently: try to find another pairing.
    sides: dict[Any, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((left, right)):
        for row in rows:
            sides[_outline(row)][side].append(row)
    return all(len(ours) == len(theirs) <= _MATCHED_ROWS and _can_pair(ours, theirs) for ours, theirs in sides.values())


def same_set(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Whether both hold the same distinct rows, exactly: how SkyRL-SQL compares, for matching published numbers."""
    return frozenset(left) == frozenset(right)


def same_order(left: Sequence[Row], gold: Sequence[Row], keys: Sequence[Row]) -> bool:
    """Whether the rows come in the gold rows' order, up to ties.

    Args:
        left: The rows to judge.
        gold: The gold rows.
        keys: The values of the gold query's ORDER BY terms for each gold row.
    """
    if len(left) != len(gold):
        return False
    start = 0
    for _, tied in groupby(keys):
        end = start + sum(1 for _ in tied)
        if not same_multiset(left[start:end], gold[start:end]):
            return False
        start = end
    return True


def _is_whole(number: int | float) -> bool:
    return isinstance(number, int) or number.is_integer()


def _sort_key(row: Row) -> tuple[Any, ...]:
    return tuple(_cell_key(value) for value in row)


def _cell_key(value: Value) -> tuple[int, Any]:
    if value is None:
        return (0, 0)
    if isinstance(value, int | float):
        return (1, value)
    return (2, value) if isinstance(value, str) else (3, value)


def _outline(row: Row) -> tuple[Any, ...]:
    """The row without its numbers: only rows with equal outlines can be equal."""
    return tuple((1, None) if isinstance(value, int | float) else _cell_key(value) for value in row)


def _can_pair(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Bipartite matching by augmenting paths (Kuhn): whether every row on the left finds its own on the right."""
    partner: dict[int, int] = {}
    for start in range(len(left)):
        # Breadth-first, so that a long chain of near-equal rows cannot exhaust the stack.
        came_from: dict[int, int] = {}
        frontier, free = [start], None
        while frontier and free is None:
            row = frontier.pop(0)
            for other in range(len(right)):
                if other in came_from or not same_row(left[row], right[other]):
                    continue
                came_from[other] = row
                if other not in partner:
                    free = other
                    break
                frontier.append(partner[other])
        if free is None:
            return False
        while True:
            row = came_from[free]
            previous = next((other for other, owner in partner.items() if owner == row), None)
            partner[free] = row
            if previous is None or row == start:
                break
            free = previous
    return True
