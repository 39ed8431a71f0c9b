"""Promise 18: What an agent sends (SQL, shell, files, HTTP) cannot leave its sandbox, and every such action has a
time, output and memory limit. Here: SQL."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgym_sql.env import SQLEnv

from stepgym.env.shared import close_shared
from stepgym.env.task import Task

SECRET = "a row of another database"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sandbox")
    for name, text in (("mine", "a row of this database"), ("other", SECRET)):
        connection = sqlite3.connect(folder / f"{name}.sqlite")
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.executemany("INSERT INTO t VALUES (?)", [(text,)] * 300)
        connection.execute("CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END")
        connection.commit()
        connection.close()
    yield folder
    close_shared(SQLEnv)


@pytest.fixture(scope="module")
def env(folder: Path) -> SQLEnv:
    return SQLEnv(database_root=str(folder), workers=1, query_timeout=0.5, score_timeout=0.5, memory_mb=32)


def state(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def send(env: SQLEnv, sql: str, tag: str = "sql") -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "?"}]
    env.reset(options={"task": Task("t", "?", "SELECT a FROM t", {"database": "mine.sqlite", "messages": messages})})
    started = time.monotonic()
    observation, reward, _, _, info = env.step(f"<think>x</think><{tag}>{sql}</{tag}>")
    assert time.monotonic() - started < 30  # nothing hangs; how fast it is belongs to the benchmarks
    assert reward == 0.0
    return "".join(message["content"] for message in observation), info


ESCAPES = [
    "ATTACH DATABASE '{folder}/other.sqlite' AS o",
    "ATTACH DATABASE '{folder}/new.sqlite' AS n",
    "ATTACH ':memory:' AS m",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO '{folder}/copy.sqlite'",
    "INSERT INTO t VALUES ('x')",
    "UPDATE t SET a = 'x'",
    "DELETE FROM t",
    "REPLACE INTO t VALUES ('x')",
    "WITH x AS (SELECT 1) INSERT INTO t SELECT * FROM x RETURNING a",
    "DROP TABLE t",
    "ALTER TABLE t RENAME TO u",
    "CREATE TABLE u (a)",
    "CREATE TEMP TABLE u AS SELECT 1",
    "CREATE VIEW v AS SELECT 1",
    "CREATE INDEX i ON t (a)",
    "CREATE TRIGGER q AFTER INSERT ON t BEGIN SELECT 1; END",
    "CREATE VIRTUAL TABLE v USING fts5(a)",
    "CREATE VIRTUAL TABLE v USING csv(filename='/etc/passwd')",
    "ANALYZE",
    "BEGIN EXCLUSIVE",
    "SAVEPOINT s",
    "COMMIT",
    "PRAGMA writable_schema = 1",
    "PRAGMA query_only = 0",
    "PRAGMA journal_mode = WAL",
    "PRAGMA hard_heap_limit = 0",
    "PRAGMA trusted_schema = 1",
    "PRAGMA temp_store_directory = '{folder}'",
    "PRAGMA user_version = 7",
    "PRAGMA mmap_size = 1000000000",
    "PRAGMA wal_checkpoint",
    "PRAGMA database_list",
    "SELECT file FROM pragma_database_list",
    "SELECT load_extension('{folder}/x.so')",
    "SELECT fts3_tokenizer('simple', x'0000000000000000')",
    "SELECT readfile('{folder}/other.sqlite')",
    "SELECT writefile('{folder}/new', 'x')",
    "SELECT edit('x', 'sh')",
    "SELECT 1; DELETE FROM t",
]


@pytest.mark.parametrize("tag", ["sql", "solution"])
@pytest.mark.parametrize("sql", ESCAPES)
def test_nothing_leaves_the_sandbox(env: SQLEnv, folder: Path, sql: str, tag: str) -> None:
    before = state(folder)
    seen, info = send(env, sql.format(folder=folder), tag)
    assert state(folder) == before
    assert info.get("action_error") or info.get("solution_error")
    assert SECRET not in seen
    assert str(folder) not in seen.replace(sql.format(folder=folder), "")


FRAGMENTS = [
    *(
        "SELECT",
        "FROM",
        "t",
        "a",
        "*",
        "WHERE",
        "=",
        "'x'",
        "(",
        ")",
        ";",
        ",",
        "1",
        "--\n",
        "INTO",
        "VALUES",
        "SET",
        "AS",
    ),
    *(
        "ATTACH",
        "DETACH",
        "VACUUM",
        "INSERT",
        "UPDATE",
        "DELETE",
        "DROP",
        "TABLE",
        "CREATE",
        "TEMP",
        "PRAGMA",
        "REINDEX",
    ),
    *(
        "writable_schema",
        "journal_mode",
        "wal",
        "BEGIN",
        "COMMIT",
        "WITH",
        "RETURNING",
        "EXPLAIN",
        "main",
        "sqlite_master",
    ),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=9))
def test_no_statement_changes_a_database_or_makes_a_file(env: SQLEnv, folder: Path, words: list[str]) -> None:
    before = state(folder)
    env_task = {"database": "mine.sqlite", "messages": [{"role": "user", "content": "?"}]}
    env.reset(options={"task": Task("t", "?", "SELECT a FROM t", env_task)})
    env.step(f"<think>x</think><sql>{' '.join(words)}</sql>")
    assert state(folder) == before


EXCESSES = [
    "SELECT randomblob(1000000000)",
    "SELECT hex(zeroblob(1000000000))",
    "SELECT count(*) FROM t a, t b, t c, t d",
    "SELECT * FROM t a, t b, t c ORDER BY random()",
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r",
    "WITH RECURSIVE r(x) AS (SELECT randomblob(999999) UNION SELECT randomblob(999999) FROM r) SELECT count(*) FROM r",
    "SELECT group_concat(a.a || hex(randomblob(5000))) FROM t a, t b",
    "SELECT instr(zeroblob(15000000) || x'01', zeroblob(8000000) || x'02')",
    "SELECT replace(hex(zeroblob(7000000)), '0', 'ab')",
    "SELECT 1 WHERE hex(zeroblob(7000000)) LIKE '" + "%0" * 2000 + "%1'",
]


@pytest.mark.parametrize("tag", ["sql", "solution"])
@pytest.mark.parametrize("sql", EXCESSES)
def test_time_and_memory_are_limited_and_the_next_query_works(env: SQLEnv, sql: str, tag: str) -> None:
    _, info = send(env, sql, tag)
    said = str(info.get("action_error") or info.get("solution_error"))
    assert "exceeded its" in said or "too big" in said
    (worker,) = env.shared.pool.processes or [None]
    if worker is not None:
        assert psutil.Process(worker).memory_info().rss < 200 << 20
    assert "a row of this database" in send(env, "SELECT a FROM t LIMIT 1")[0]


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r",
        "SELECT a.a, b.a, c.a FROM t a, t b, t c",
        "SELECT hex(zeroblob(7000000))",
        "SELECT zeroblob(15000000)",
        "SELECT printf('%900000d', 1), printf('%900000d', 2) FROM t",
        "SELECT " + ", ".join(["a"] * 1900) + " FROM t",
        "SELECT 1 AS '" + "x" * 100_000 + "'",
    ],
)
def test_what_comes_back_is_limited(env: SQLEnv, sql: str) -> None:
    seen, _ = send(env, sql)
    assert "<observation>" in seen
    assert len(seen) < 9_500
