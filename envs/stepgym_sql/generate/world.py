"""One database: a schema with the names, spellings and rows that a seed gives it."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stepgym_sql.generate.schema import Column, Spelling, Table
from stepgym_sql.generate.schemas import SCHEMA_BY_NAME
from stepgym_sql.pool import Row, Value

Variety: TypeAlias = Literal["varied", "plain"]
Names: TypeAlias = Literal["varied", "columns", "plain"]

_ID_NAMES = ("id", "code", "nr", "uid")
_SQL_TYPES = {"integer": "INTEGER", "real": "REAL", "reference": "INTEGER"}
_STYLES = ("upper", "title", "synonym", "loud_synonym", "code")


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """All that is needed to build a database again. JSON with `to_dict`.

    Attributes:
        schema: Name of the schema.
        world: The seed of its names, spellings and rows.
        rows: Rows of a table that nothing refers to; the others have half as many.
        tables: Most tables, None for all.
        columns: Most columns of a table besides its id and its references, None for all.
        names: `varied` draws the names of tables and columns from synonyms, `columns` those of columns only, `plain`
            uses the plain ones.
        spellings: `varied` draws how each category is spelled, `plain` spells it as a question does.
        column_types: Whether columns are declared with a type.
    """

    schema: str
    world: int
    rows: int = 30
    tables: int | None = None
    columns: int | None = None
    names: Names = "varied"
    spellings: Variety = "varied"
    column_types: bool = True

    def to_dict(self) -> dict[str, Any]:
        """A mapping that `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorldSpec:
        """Read what `to_dict` wrote; other keys are left alone."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(slots=True)
class StoredColumn:
    """A column as this database has it: its name, and its values row by row."""

    name: str
    column: Column
    spelled: dict[str, str] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)


@dataclass(slots=True)
class StoredTable:
    """A table as this database has it. `ids` are the values of its first column, the primary key."""

    name: str
    table: Table
    id_name: str
    columns: list[StoredColumn] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[StoredColumn]:
        """Its columns of these kinds, in the order of the database."""
        return [column for column in self.columns if column.column.kind in kinds]

    @property
    def label(self) -> StoredColumn | None:
        """The column that names its rows, if this database has one."""
        return next(iter(self.of_kind("label")), None)

    @property
    def rows(self) -> list[Row]:
        """Its rows, the id first."""
        return list(zip(self.ids, *(column.values for column in self.columns), strict=True))


class World:
    """A generated database, in memory; the same spec gives the same one everywhere."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self._random = random.Random(spec.world)
        self.tables: list[StoredTable] = []
        chosen = self._choose_tables()
        targets = {column.target for table in chosen for column in table.columns if column.kind == "reference"}
        for table in chosen:
            self.tables.append(self._draw_table(table, {other.word for other in chosen}))
        for stored in self.tables:
            count = spec.rows if stored.table.word not in targets else max(3, (spec.rows + 1) // 2)
            self._draw_rows(stored, count)

    def table(self, word: str) -> StoredTable | None:
        """The table that questions call by this word, if this database has it."""
        return next((table for table in self.tables if table.table.word == word), None)

    def ddl(self) -> list[str]:
        """One CREATE TABLE statement per table, each on one line."""
        typed = self.spec.column_types
        statements = []
        for stored in self.tables:
            parts = [f"{stored.id_name} INTEGER PRIMARY KEY"]
            for column in stored.columns:
                target = self.table(column.column.target)
                kind = _SQL_TYPES.get(column.column.kind, "TEXT")
                part = f"{column.name} {kind}" if typed else column.name
                parts.append(part if target is None else f"{part} REFERENCES {target.name}({target.id_name})")
            statements.append(f"CREATE TABLE {stored.name} ({', '.join(parts)})")
        return statements

    def fill(self, connection: sqlite3.Connection) -> None:
        """Create the tables and rows on an empty connection."""
        for statement, stored in zip(self.ddl(), self.tables, strict=True):
            connection.execute(statement)
            marks = ", ".join("?" * (1 + len(stored.columns)))
            connection.executemany(f"INSERT INTO {stored.name} VALUES ({marks})", stored.rows)

    def write(self, path: Path) -> None:
        """Write the database to a new file."""
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            # Nobody reads the file before it is whole, and it can be made again: nothing need survive a crash.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            self.fill(connection)
            connection.execute("COMMIT")
        finally:
            connection.close()

    def _choose_tables(self) -> list[Table]:
        """A part of the schema that hangs together: a table, what it refers to, then others, in the schema's order."""
        tables = SCHEMA_BY_NAME[self.spec.schema].tables
        most = len(tables) if self.spec.tables is None else self.spec.tables
        if most >= len(tables):
            return list(tables)
        by_word = {table.word: table for table in tables}
        chosen: list[str] = []
        candidates = [table.word for table in self._random.sample(tables, len(tables))]
        while len(chosen) < most:
            word = candidates.pop(0)
            chosen.append(word)
            linked = [column.target for column in by_word[word].columns if column.kind == "reference"]
            self._random.shuffle(linked)
            candidates = [other for other in dict.fromkeys((*linked, *candidates)) if other not in chosen]
        return [table for table in tables if table.word in chosen]

    def _draw_table(self, table: Table, present: set[str]) -> StoredTable:
        columns = self._choose_columns(table)
        columns = [column for column in columns if column.kind != "reference" or column.target in present]
        taken = {stored.name for stored in self.tables}
        name = self._draw_name(table.names, taken, self.spec.names == "varied")
        used: set[str] = set()
        if self.spec.names != "plain":
            id_name = self._random.choice(_ID_NAMES)
        else:
            id_name = "id"
        used.add(id_name)
        stored = StoredTable(name, table, id_name)
        for column in columns:
            column_name = self._draw_name(column.names, used, self.spec.names != "plain")
            used.add(column_name)
            stored.columns.append(StoredColumn(column_name, column, self._spell(column)))
        return stored

    def _choose_columns(self, table: Table) -> list[Column]:
        columns = list(table.columns)
        if self.spec.columns is not None:
            # What questions need most comes first: a label, a category and two numbers, one of them to be mistaken for.
            references = [column for column in columns if column.kind == "reference"]
            others = self._random.sample(columns, len(columns))
            numbers = [column for column in others if column.is_number and not column.nulls][:2]
            first = [column for column in others if column.kind in ("label", "category")]
            order = [*sorted(first, key=lambda column: column.kind), *numbers]
            order += [column for column in others if column not in order and column not in references]
            kept = [*references, *order[: self.spec.columns]]
            columns = [column for column in columns if column in kept]
        if self.spec.names != "plain":
            self._random.shuffle(columns)
        return columns

    def _draw_name(self, names: tuple[str, ...], taken: set[str], varied: bool) -> str:
        if not varied:
            return next(name for name in names if name not in taken)
        return self._random.choice([name for name in names if name not in taken])

    def _spell(self, column: Column) -> dict[str, str]:
        if column.kind != "category":
            return {}
        style = "plain" if self.spec.spellings == "plain" else self._random.choice(_STYLES)
        return {spelling.word: _spelled(spelling, style) for spelling in column.spellings}

    def _draw_rows(self, stored: StoredTable, count: int) -> None:
        start = self._random.choice((1, 1, 10, 100))
        stored.ids = list(range(start, start + count))
        for column in stored.columns:
            column.values = self._draw_values(column, count)
            if column.column.nulls and count:
                for index in range(count):
                    if self._random.random() < column.column.nulls:
                        column.values[index] = None

    def _draw_values(self, stored: StoredColumn, count: int) -> list[Value]:
        column, draw = stored.column, self._random
        low, high = column.low, column.high
        if column.kind == "label":
            return list(self._labels(column, count))
        if column.kind == "text":
            words = draw.sample(column.values[0], max(2, len(column.values[0]) // 2))
            return [draw.choice(words) for _ in range(count)]
        if column.kind == "category":
            return [stored.spelled[draw.choice(column.spellings).word] for _ in range(count)]
        if column.kind == "integer":
            return [draw.randint(low, high) for _ in range(count)]
        if column.kind == "real":
            return [round(draw.uniform(low, high), draw.choice((0, 1, 2))) for _ in range(count)]
        if column.kind == "reference":
            target = self.table(column.target)
            assert target is not None
            return [draw.choice(target.ids) for _ in range(count)]
        first = date(low, 1, 1)
        days = (date(high, 12, 31) - first).days
        return [(first + timedelta(days=draw.randint(0, days))).isoformat() for _ in range(count)]

    def _labels(self, column: Column, count: int) -> list[str]:
        """Unique names; where the words run out, they are numbered."""
        lists = column.values
        every = [" ".join(words) for words in _product(lists)]
        labels = self._random.sample(every, min(count, len(every)))
        number = 2
        while len(labels) < count:
            labels += [f"{name} {number}" for name in every[: count - len(labels)]]
            number += 1
        return labels


def _product(lists: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    if len(lists) == 1:
        return [(word,) for word in lists[0]]
    return [(first, second) for first in lists[0] for second in lists[1]]


def _spelled(spelling: Spelling, style: str) -> str:
    return {
        "plain": spelling.word,
        "upper": spelling.word.upper(),
        "title": spelling.word.capitalize() if spelling.word.islower() else spelling.word.lower(),
        "synonym": spelling.synonym,
        "loud_synonym": spelling.synonym.upper(),
        "code": spelling.code,
    }[style]
