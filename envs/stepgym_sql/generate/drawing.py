"""What the kinds of questions have in common: picking tables and columns, wording, slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from stepgym_sql.generate.plan import Slot, quote
from stepgym_sql.generate.world import StoredColumn, StoredTable, World

Draw: TypeAlias = random.Random
T = TypeVar("T")

_LOOKALIKES = (("integer", "real"), ("label", "text"), ("date",))


def pick(draw: Draw, options: Sequence[T]) -> T | None:
    """One of the options, None where there are none."""
    return draw.choice(options) if options else None


def say(draw: Draw, paraphrase: bool, *wordings: str) -> str:
    """One of several wordings of the same question; always the first one without `paraphrase`."""
    return draw.choice(wordings) if paraphrase else wordings[0]


def with_category(world: World, draw: Draw) -> tuple[StoredTable, StoredColumn, str] | None:
    """A table, one of its category columns, and a category, as a question says it, that occurs there."""
    table = pick(draw, [table for table in world.tables if table.of_kind("category")])
    if table is None:
        return None
    category = draw.choice(table.of_kind("category"))
    words = [word for word, stored in category.spelled.items() if stored in category.values]
    return table, category, draw.choice(words)


def nullable(table: StoredTable) -> list[StoredColumn]:
    """The columns in which something is missing."""
    return [column for column in table.columns if None in column.values and column.column.kind != "reference"]


def direction(draw: Draw, column: StoredColumn) -> tuple[str, str]:
    """ASC or DESC, and the word for what comes first."""
    descending = draw.random() < 0.5
    if column.column.kind == "date":
        return ("DESC", "latest") if descending else ("ASC", "earliest")
    return ("DESC", "highest") if descending else ("ASC", "lowest")


def lookalikes(table: StoredTable, column: StoredColumn) -> list[StoredColumn]:
    """The other columns of the table that hold the same kind of thing, in the order of the database."""
    kinds = next(kinds for kinds in _LOOKALIKES if column.column.kind in kinds)
    return [other for other in table.of_kind(*kinds) if other is not column]


def column_slot(table: StoredTable, column: StoredColumn, prefix: str = "") -> dict[str, Slot]:
    """The choice of a column; the wrong one is the first other column of the table that could be meant."""
    others = lookalikes(table, column)
    wrong = prefix + others[0].name if others else None
    return {"column": Slot(prefix + column.name, wrong, "column")}


def value_slot(table: StoredTable, category: StoredColumn, word: str) -> dict[str, Slot]:
    """The spelling of a category; the wrong one is the question's own word."""
    stored = category.spelled[word]
    if stored == word:
        return {"value": Slot(quote(stored), None, "values")}
    look = f"SELECT DISTINCT {category.name} FROM {table.name}"
    return {"value": Slot(quote(stored), quote(word), "values", look)}
