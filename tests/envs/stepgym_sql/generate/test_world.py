from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_sql.generate.schemas import SCHEMA_NAMES, SCHEMAS
from stepgym_sql.generate.world import World, WorldSpec

SPECS = st.builds(
    WorldSpec,
    schema=st.sampled_from(SCHEMA_NAMES),
    world=st.integers(0, 2**52),
    rows=st.integers(4, 40),
    tables=st.sampled_from([None, 1, 2, 3]),
    columns=st.sampled_from([None, 2, 3, 4, 6]),
    names=st.sampled_from(["varied", "columns", "plain"]),
    spellings=st.sampled_from(["varied", "plain"]),
    column_types=st.booleans(),
)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA foreign_keys = ON")
    yield connection
    connection.close()


def test_there_are_at_least_eight_schemas_each_with_linked_tables_nulls_dates_and_numbers() -> None:
    assert len(SCHEMAS) >= 8
    assert len(set(SCHEMA_NAMES)) == len(SCHEMAS)
    for schema in SCHEMAS:
        columns = [column for table in schema.tables for column in table.columns]
        kinds = {column.kind for column in columns}
        assert len(schema.tables) >= 3
        assert {"label", "text", "category", "integer", "real", "date", "reference"} <= kinds, schema.name
        assert any(column.nulls for column in columns), schema.name


def test_every_name_is_an_identifier_that_needs_no_quotes(connection: sqlite3.Connection) -> None:
    for schema in SCHEMAS:
        for table in schema.tables:
            for name in table.names:
                connection.execute(f"CREATE TABLE {name} (x)")
                connection.execute(f"DROP TABLE {name}")
            for column in table.columns:
                for name in column.names:
                    connection.execute(f"CREATE TABLE t ({name} TEXT)")
                    connection.execute(f"SELECT {name} FROM t WHERE {name} = 1 ORDER BY {name}")
                    connection.execute("DROP TABLE t")


def test_what_is_named_differently_is_as_asked() -> None:
    def names(kind: str) -> tuple[set[str], set[str]]:
        worlds = [World(WorldSpec(schema="shop", world=world, rows=4, names=kind)) for world in range(30)]
        tables = [table for world in worlds for table in world.tables]
        return {t.name for t in tables}, {column.name for t in tables for column in t.columns}

    plain, columns, varied = names("plain"), names("columns"), names("varied")
    assert columns[0] == plain[0] < varied[0]
    assert plain[1] < columns[1] == varied[1]


def test_synonyms_in_a_table_never_mean_two_columns() -> None:
    for schema in SCHEMAS:
        for table in schema.tables:
            names = [name for column in table.columns for name in column.names]
            assert len(names) == len(set(names)), (schema.name, table.word)
            assert all(len(column.names) >= 3 for column in table.columns)
            for column in table.columns:
                forms = [form for s in column.spellings for form in {s.word, s.synonym, s.code}]
                assert len({form.lower() for form in forms}) == len(forms), (schema.name, column.word)


@settings(max_examples=60, deadline=None)
@given(spec=SPECS)
def test_a_spec_gives_one_sound_database(spec: WorldSpec) -> None:
    again = WorldSpec.from_dict({**json.loads(json.dumps(spec.to_dict())), "kind": "count"})
    assert again == spec
    world, twin = World(spec), World(again)
    assert world.ddl() == twin.ddl()
    assert [table.rows for table in world.tables] == [table.rows for table in twin.tables]
    if spec.tables is not None:
        assert len(world.tables) == min(spec.tables, 3)
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        world.fill(connection)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        for table in world.tables:
            stored = connection.execute(f"SELECT * FROM {table.name}").fetchall()
            assert stored == table.rows
            if spec.columns is not None:
                assert len(table.columns) - len(table.of_kind("reference")) <= spec.columns
            if table.label is not None:
                assert len(set(table.label.values)) == len(table.label.values)
            for column in table.of_kind("category"):
                plain = spec.spellings == "plain"
                assert all((word == stored) == plain for word, stored in column.spelled.items())
    finally:
        connection.close()


def test_the_same_spec_writes_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        World(WorldSpec("shop", 7)).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_worlds_differ_in_names_spellings_and_rows() -> None:
    worlds = [World(WorldSpec("library", seed, tables=1)) for seed in range(60)]
    assert len({tuple(world.ddl()) for world in worlds}) > 50
    spelled = {tuple(column.spelled.values()) for world in worlds for column in world.tables[0].of_kind("category")}
    assert len(spelled) >= 8


def test_plain_names_are_the_first_ones() -> None:
    world = World(WorldSpec("shop", 3, names="plain", spellings="plain", column_types=False))
    assert world.ddl()[0] == "CREATE TABLE suppliers (id INTEGER PRIMARY KEY, name, city, rating, employees)"
    assert "supplier_id" not in world.ddl()[0]
    assert "product_id REFERENCES products(id)" in world.ddl()[2]
