"""Days, and how they are written."""

from __future__ import annotations

import re

from stepgym_search.encyclopedia.draws import Stream

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

Day = tuple[int, int, int]
"""Year, month from 1, day of the month."""

_FORMS = (
    re.compile(r"(?P<day>\d{1,2}) (?P<month>[A-Z][a-z]+) (?P<year>\d{4})"),
    re.compile(r"(?P<month>[A-Z][a-z]+) (?P<day>\d{1,2}), (?P<year>\d{4})"),
    re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)"),
)


def draw_day(stream: Stream, year: int) -> Day:
    """A day of that year that exists in every year."""
    return year, 1 + stream.below(12), 1 + stream.below(28)


def spellings(day: Day) -> list[str]:
    """`12 March 1874`, `March 12, 1874`, `1874-03-12`."""
    year, month, number = day
    name = MONTHS[month - 1]
    return [f"{number} {name} {year}", f"{name} {number}, {year}", f"{year:04}-{month:02}-{number:02}"]


def read_day(text: str) -> Day | None:
    """The day that a text in one of the three spellings says; None for any other text."""
    for form in _FORMS:
        match = form.fullmatch(text)
        if match is None:
            continue
        month = match["month"]
        if month.isdigit():
            return int(match["year"]), int(month), int(match["day"])
        if month in MONTHS:
            return int(match["year"]), MONTHS.index(month) + 1, int(match["day"])
    return None
