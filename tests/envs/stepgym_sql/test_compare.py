from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_sql.compare import same_multiset, same_order, same_row, same_set, same_value

CELLS = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, width=32),
    st.sampled_from(["", "a", "A", "1", "\udcff"]),
    st.binary(max_size=3),
)
ROWS = st.lists(st.tuples(CELLS, CELLS), max_size=8)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (None, None, True),
        (None, 0, False),
        (None, "", False),
        (2, 2.0, True),
        (1, "1", False),
        ("a", "A", False),
        ("a", b"a", False),
        (b"a", b"a", True),
        (0.1 + 0.2, 0.3, True),
        (1.0000009, 1.0, True),
        (1.000003, 1.0, False),
        (1e-7, 0, True),
        (1e-5, 0, False),
        (1e12 + 0.5, 1e12, True),
        (1_000_000, 1_000_001, False),
        (1_000_000.0, 1_000_001, False),
        (2**53 + 1, 2**53, False),
        (9223372036854775807, 9223372036854775806, False),
        (float("inf"), float("inf"), True),
        (float("inf"), float("-inf"), False),
        (float("inf"), 1e308, False),
    ],
)
def test_same_value(left: Any, right: Any, equal: bool) -> None:
    assert same_value(left, right) is equal
    assert same_value(right, left) is equal


def test_rows_of_different_width_are_different() -> None:
    assert not same_row((1, 2), (1,))
    assert not same_multiset([(1, 2)], [(1,)])


@given(rows=ROWS, seed=st.integers(0, 100))
def test_a_multiset_ignores_order_and_nothing_else(rows: list[Any], seed: int) -> None:
    shuffled = rows[:]
    random.Random(seed).shuffle(shuffled)
    assert same_multiset(rows, shuffled)
    if rows:
        assert not same_multiset(rows, rows[1:])
        assert not same_multiset(rows, [*rows, rows[0]])


@given(left=ROWS, right=ROWS)
def test_a_multiset_comparison_is_symmetric_and_finer_than_sets(left: list[Any], right: list[Any]) -> None:
    assert same_multiset(left, right) == same_multiset(right, left)
    if left == right:
        assert same_multiset(left, right)
        assert same_set(left, right)


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=10),
    shifts=st.lists(st.floats(-9e-7, 9e-7), min_size=20, max_size=20),
    seed=st.integers(0, 100),
)
def test_rounding_never_matters(rows: list[Any], shifts: list[float], seed: int) -> None:
    moved = [(a, b + shifts[2 * i] / 2, c + shifts[2 * i + 1] / 2) for i, (a, b, c) in enumerate(rows)]
    # Whole numbers are exact by rule; a shift that leaves one whole or makes one whole is not rounding.
    if any(value.is_integer() for row in rows + moved for value in row[1:]):
        return
    random.Random(seed).shuffle(moved)
    assert same_multiset(rows, moved)
    assert same_multiset(moved, rows)


def test_near_equal_rows_are_paired_even_where_sorting_pairs_them_wrongly() -> None:
    left = [(1.1, "b"), (1.1000001, "a")]
    right = [(1.1, "a"), (1.1000001, "b")]
    assert same_multiset(left, right)
    chain = [(0.5 + i * 6e-7, 0.25 - i * 6e-7) for i in range(60)]
    assert same_multiset(chain, list(reversed(chain)))
    assert not same_multiset([*chain, (0.5, 9.5)], [*chain, (0.5, 9.6)])


def test_duplicates_and_order_are_ignored_by_sets_only() -> None:
    assert same_set([(1,), (1,), (2,)], [(2,), (1,)])
    assert not same_multiset([(1,), (1,), (2,)], [(2,), (1,)])
    assert not same_multiset([(1,), (1,), (2,)], [(2,), (2,), (1,)])


def test_order_counts_up_to_ties() -> None:
    gold = [("a", 3), ("b", 2), ("c", 2), ("d", 1)]
    keys = [(row[1],) for row in gold]
    assert same_order(gold, gold, keys)
    assert same_order([gold[0], gold[2], gold[1], gold[3]], gold, keys)
    assert not same_order([gold[1], gold[0], gold[2], gold[3]], gold, keys)
    assert not same_order(gold[:3], gold, keys)
    assert not same_order([], gold, keys)


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.text(max_size=2)), max_size=9), seed=st.integers(0, 100))
def test_any_order_within_ties_is_right_and_reversed_blocks_are_wrong(rows: list[Any], seed: int) -> None:
    gold = sorted(rows, key=lambda row: row[0])
    keys = [(row[0],) for row in gold]
    draw = random.Random(seed)
    other = sorted(rows, key=lambda row: (row[0], draw.random()))
    assert same_order(other, gold, keys)
    if keys and keys[0] != keys[-1]:
        assert not same_order(sorted(rows, key=lambda row: -row[0]), gold, keys)


def test_large_results_compare_quickly_enough_to_be_used() -> None:
    rows: list[Any] = [(i % 7, f"name {i}", i / 3) for i in range(30_000)]
    moved = [(a, b, c + 1e-9) for a, b, c in reversed(rows)]
    assert same_multiset(rows, moved)
    assert not same_multiset(rows, [*moved[:-1], (99, "name", 1.5)])
