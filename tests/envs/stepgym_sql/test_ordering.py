from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from stepgym_sql.ordering import find_ordering, order_keys
from stepgym_sql.pool import QueryResult

ROWS = [("ada", "x", 3, 1.5), ("Ben", "x", 2, 1.5), ("cleo", "y", 2, 2.5), ("Dana", "y", 1, 0.5), ("ada", "z", 1, 0.5)]


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (name TEXT, kind TEXT, age INTEGER, size REAL)")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", ROWS)
    yield connection
    connection.close()


def run(connection: sqlite3.Connection, sql: str) -> QueryResult:
    try:
        cursor = connection.execute(sql)
    except sqlite3.Error as error:
        return QueryResult(error=str(error), fault="sql")
    return QueryResult(columns=[column[0] for column in cursor.description], rows=cursor.fetchall())


def keys_of(connection: sqlite3.Connection, sql: str) -> object:
    result = run(connection, sql)
    ordering = find_ordering(sql, result.columns)
    return "unordered" if ordering is None else order_keys(ordering, result, lambda other: run(connection, other))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT name FROM t",
        "SELECT * FROM (SELECT name FROM t ORDER BY age)",
        "SELECT name FROM t WHERE age = (SELECT age FROM t ORDER BY age LIMIT 1)",
        "WITH s AS (SELECT name FROM t ORDER BY age) SELECT * FROM s",
        "SELECT group_concat(name) OVER (ORDER BY age) FROM t",
    ],
)
def test_only_the_outermost_query_orders(connection: sqlite3.Connection, sql: str) -> None:
    assert keys_of(connection, sql) == "unordered"


def test_a_query_that_cannot_be_parsed_does_not_order() -> None:
    assert find_ordering("SELECT ((( ORDER BY", ["a"]) is None


@pytest.mark.parametrize(
    ("sql", "keys"),
    [
        ("SELECT name, age FROM t ORDER BY age DESC", [(3,), (2,), (2,), (1,), (1,)]),
        ("SELECT name, age FROM t ORDER BY 2 DESC", [(3,), (2,), (2,), (1,), (1,)]),
        ("SELECT name, age AS years FROM t ORDER BY years", [(1,), (1,), (2,), (2,), (3,)]),
        ("SELECT * FROM t ORDER BY t.age", [(1,), (1,), (2,), (2,), (3,)]),
        ("SELECT name FROM t ORDER BY age DESC", [(3,), (2,), (2,), (1,), (1,)]),
        ("SELECT name FROM t ORDER BY age DESC LIMIT 2", [(3,), (2,)]),
        ("SELECT name FROM t ORDER BY age, size DESC", [(1, 0.5), (1, 0.5), (2, 2.5), (2, 1.5), (3, 1.5)]),
        ("SELECT kind, count(*) FROM t GROUP BY kind ORDER BY count(*) DESC", [(2,), (2,), (1,)]),
        ("SELECT kind FROM t GROUP BY kind ORDER BY sum(age) DESC", [(5,), (3,), (1,)]),
        ("SELECT -age AS age FROM t ORDER BY t.age", [(1,), (1,), (2,), (2,), (3,)]),
        ("SELECT age FROM t UNION ALL SELECT age FROM t ORDER BY age", [(1,)] * 4 + [(2,)] * 4 + [(3,)] * 2),
        ("SELECT DISTINCT age FROM t ORDER BY age", [(1,), (2,), (3,)]),
        (
            "SELECT name FROM t ORDER BY name COLLATE NOCASE",
            [("ada",), ("ada",), ("ben",), ("cleo",), ("dana",)],
        ),
        ("WITH s AS (SELECT * FROM t) SELECT name FROM s ORDER BY age", [(1,), (1,), (2,), (2,), (3,)]),
    ],
)
def test_keys_are_the_values_that_the_query_orders_by(connection: sqlite3.Connection, sql: str, keys: object) -> None:
    assert keys_of(connection, sql) == keys


def test_distinct_ordered_by_what_it_does_not_return_has_no_keys(connection: sqlite3.Connection) -> None:
    assert keys_of(connection, "SELECT DISTINCT kind FROM t ORDER BY age") is None
