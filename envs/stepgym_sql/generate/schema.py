"""The words that a schema is described in: tables and columns as people speak of them, and as databases spell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["label", "text", "category", "integer", "real", "date", "reference"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """A category as a question says it (`word`), another word for it, and a short code."""

    word: str
    synonym: str
    code: str


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        word: What a question calls it.
        names: What a database may call it; the first one is the plain name.
        kind: `label` (a unique name of the row), `text` (free words, repeated), `category` (one of a few, spelled
            differently in every database), `integer`, `real`, `date`, `reference` (to the id of another table).
        low: Smallest number, or first year of a date.
        high: Largest number, or last year of a date.
        nulls: Share of rows without a value.
        values: Words that a label or text is drawn from; two lists of words are combined.
        spellings: The categories.
        target: Name of the table that a reference points to.
    """

    word: str
    names: tuple[str, ...]
    kind: Kind
    low: int = 0
    high: int = 0
    nulls: float = 0.0
    values: tuple[tuple[str, ...], ...] = ()
    spellings: tuple[Spelling, ...] = ()
    target: str = ""

    @property
    def is_number(self) -> bool:
        """Whether it can be added up and compared."""
        return self.kind in ("integer", "real")


@dataclass(frozen=True, slots=True)
class Table:
    """One table: what a question calls one of its rows, and several; what a database may call it."""

    word: str
    plural: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def label(self) -> Column | None:
        """The column that names its rows, if it has one."""
        return next((column for column in self.columns if column.kind == "label"), None)


@dataclass(frozen=True, slots=True)
class Schema:
    """A database schema of some domain. A table stands after the tables that it refers to."""

    name: str
    tables: tuple[Table, ...]


def table(words: str, names: str, *columns: Column) -> Table:
    """A table; `words` is `singular/plural`, `names` are separated by spaces."""
    word, plural = words.split("/")
    return Table(word, plural, tuple(names.split()), columns)


def label(word: str, names: str, *values: str) -> Column:
    """A unique name, drawn from one list of words or combined from two."""
    return Column(word, tuple(names.split()), "label", values=tuple(tuple(v.split()) for v in values))


def text(word: str, names: str, values: str, nulls: float = 0.0) -> Column:
    """Free words that repeat."""
    return Column(word, tuple(names.split()), "text", values=(tuple(values.split()),), nulls=nulls)


def category(word: str, names: str, *spellings: str) -> Column:
    """One of a few; each is `word/synonym/code`."""
    parsed = tuple(Spelling(*spelling.split("/")) for spelling in spellings)
    return Column(word, tuple(names.split()), "category", spellings=parsed)


def integer(word: str, names: str, low: int, high: int, nulls: float = 0.0) -> Column:
    """A whole number from `low` to `high`."""
    return Column(word, tuple(names.split()), "integer", low, high, nulls)


def real(word: str, names: str, low: int, high: int, nulls: float = 0.0) -> Column:
    """A number with up to two decimals, from `low` to `high`."""
    return Column(word, tuple(names.split()), "real", low, high, nulls)


def date(word: str, names: str, low: int = 2018, high: int = 2024, nulls: float = 0.0) -> Column:
    """A day of the years `low` to `high`, as ISO text."""
    return Column(word, tuple(names.split()), "date", low, high, nulls)


def reference(target: str, names: str, nulls: float = 0.0) -> Column:
    """The id of a row of another table."""
    return Column(target, tuple(names.split()), "reference", nulls=nulls, target=target)
