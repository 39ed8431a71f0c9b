from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_sql.observation import cell_text, result_text, table_text, visible, wrap
from stepgym_sql.pool import QueryResult

LIMITS: dict[str, Any] = {"shown_rows": 50, "max_chars": 9000, "observation_format": "skyrl"}


def test_the_wrapping_is_the_published_one() -> None:
    assert wrap("rows", 3, "skyrl") == (
        "\n\n<observation>rows\n<reminder>You have 3 turns left to complete the task.</reminder></observation>\n\n"
    )
    assert wrap("rows", 3, "brief") == "<observation>rows\n<reminder>3 left</reminder></observation>"


def test_a_table_has_the_names_of_its_columns_and_shows_nulls() -> None:
    result = QueryResult(columns=("name", "n"), rows=[("Velor", 4), ("B", None)])
    assert result_text(result, **LIMITS) == " name    n\nVelor    4\n    B NULL"
    assert result_text(result, **{**LIMITS, "observation_format": "brief"}) == "name|n\nVelor|4\nB|NULL"


def test_no_rows_and_errors_are_said() -> None:
    assert result_text(QueryResult(columns=("a", "b")), **LIMITS) == "a b\n(no rows)"
    assert result_text(QueryResult(error="no such table: x", fault="sql"), **LIMITS) == (
        "Error executing SQL: no such table: x"
    )


def test_a_long_result_is_cut_to_fifty_rows_and_says_so() -> None:
    result = QueryResult(columns=("n",), rows=[(f"row {n:04}",) for n in range(2000)])
    text = result_text(result, **LIMITS)
    assert text.startswith("Truncated to 50 of 2000 rows since the result is too long:\n")
    assert "row 0049" in text
    assert "row 0050" not in text
    short = QueryResult(columns=("n",), rows=[(n,) for n in range(200)])
    assert result_text(short, **LIMITS).count("\n") == 200
    unread = QueryResult(columns=("n",), rows=[(n,) for n in range(200)], more=True)
    assert result_text(unread, **LIMITS).startswith("Truncated to 50 of more than 200 rows")


def test_wide_rows_are_cut_to_the_limit_and_say_so() -> None:
    result = QueryResult(columns=("n",), rows=[("x" * 30_000,)])
    text = result_text(result, **LIMITS)
    assert text.endswith("… (cut to 9000 of 60001 characters)")
    assert len(text) < 9100


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (7, "7"),
        (2.50, "2.5"),
        (float("inf"), "inf"),
        ("two\nlines\t\0", "two\\nlines\\t\\x00"),
        (b"\x00\xff", "x'00ff'"),
        (bytes(100), "x'" + "00" * 32 + "…'"),
        ("\udcff", "\ufffd"),
    ],
)
def test_cells(value: Any, text: str) -> None:
    assert cell_text(value) == text


@given(
    rows=st.lists(st.tuples(st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary())), max_size=5),
    name=st.text(min_size=1),
)
def test_every_row_is_one_line_of_valid_text(rows: list[Any], name: str) -> None:
    for form in ("skyrl", "brief"):
        text = table_text([name], rows, form)  # type: ignore[arg-type]
        text.encode("utf-8")
        assert text.count("\n") == max(1, len(rows))


@given(text=st.text())
def test_visible_text_keeps_everything_that_prints(text: str) -> None:
    if text.isprintable():
        assert visible(text) == text
