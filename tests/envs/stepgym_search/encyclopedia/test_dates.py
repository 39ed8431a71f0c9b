from __future__ import annotations

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.encyclopedia.dates import draw_day, read_day, spellings
from stepgym_search.encyclopedia.draws import Stream


def test_a_day_has_three_spellings() -> None:
    assert spellings((1874, 3, 12)) == ["12 March 1874", "March 12, 1874", "1874-03-12"]
    assert spellings((987, 11, 2))[2] == "0987-11-02"


@given(st.dates(min_value=date(1000, 1, 1)))
def test_every_spelling_is_read_back(day: date) -> None:
    parts = (day.year, day.month, day.day)
    assert [read_day(text) for text in spellings(parts)] == [parts] * 3


@pytest.mark.parametrize("text", ["", "12 Marsh 1874", "March 1874", "12 March 1874.", "1874-3-12", "Rin Manoru"])
def test_any_other_text_is_no_day(text: str) -> None:
    assert read_day(text) is None


@given(st.integers(), st.integers(1000, 2000))
def test_drawn_days_exist(seed: int, year: int) -> None:
    assert date(*draw_day(Stream(seed), year)).year == year
