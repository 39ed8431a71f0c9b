from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgym_sql.pool import QueryResult, WorkerPool

from stepgym.errors import EnvError

LIMITS: dict[str, Any] = {"timeout": 5.0, "max_rows": 1000, "max_bytes": 1 << 20}
ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"
NEVER_CHECKED = "SELECT instr(zeroblob(15000000) || x'01', zeroblob(8000000) || x'02')"


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(size=1, memory_mb=64)
    yield pool
    pool.close()


def test_rows_columns_and_types_come_back(pool: WorkerPool, shop: Path) -> None:
    result = pool.query(shop, "SELECT name, price, stock AS s, x'00ff' FROM product WHERE id IN (3, 4)", **LIMITS)
    assert result == QueryResult(
        columns=("name", "price", "s", "x'00ff'"),
        rows=[("Nimbo", 4.0, None, b"\x00\xff"), ("Tarka", 10.25, 7, b"\x00\xff")],
        seconds=result.seconds,
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(
        st.one_of(
            st.none(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.text(st.characters(exclude_categories=["Cs"])),
            st.binary(max_size=40),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_value_survives_the_way(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("values") / "v.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE v (i INTEGER PRIMARY KEY, x)")
    connection.executemany("INSERT INTO v (x) VALUES (?)", [(row,) for row in rows])
    connection.commit()
    connection.close()
    got = [row[0] for row in pool.query(path, "SELECT x FROM v ORDER BY i", **LIMITS).rows]
    assert got == rows
    assert [type(value) for value in got] == [type(row) for row in rows]


def test_bytes_that_are_not_utf8_come_back_distinguishable(pool: WorkerPool, shop: Path) -> None:
    rows = pool.query(shop, "SELECT CAST(x'ff61' AS TEXT), CAST(x'fe61' AS TEXT)", **LIMITS).rows
    assert rows == [("\udcffa", "\udcfea")]


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "   ",
        "-- only a comment",
        "/* not closed",
        "SELECT",
        "SELECT * FROM nowhere",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE product",
        "SELECT 'a\0b'",
        "SELECT \ud800",
        "SELECT 'file is not a database' FROM \"database disk image is malformed\"",
        "SELECT * FROM json_each('not json')",
        "SELECT " + ", ".join(["1"] * 3000),
        "SELECT " + "(" * 3000 + "1" + ")" * 3000,
        "SELECT 1 " + "UNION ALL SELECT 1 " * 1000,
        "SELECT '" + "x" * 300_000 + "'",
    ],
)
def test_wrong_sql_is_an_error_of_the_query(pool: WorkerPool, shop: Path, sql: str) -> None:
    result = pool.query(shop, sql, **LIMITS)
    assert result.fault == "sql"
    assert result.error
    assert "\n" not in result.error
    assert not result.rows


@pytest.mark.parametrize("sql", ["SELECT 1 -- with a comment", "SELECT /* inside */ 1;", "VALUES (1)", ";SELECT 1"])
def test_comments_and_one_semicolon_do_no_harm(pool: WorkerPool, shop: Path, sql: str) -> None:
    assert pool.query(shop, sql, **LIMITS).rows == [(1,)]


@pytest.mark.parametrize(
    "sql",
    [
        "PRAGMA table_info(product)",
        "PRAGMA table_list",
        "PRAGMA index_list(product)",
        "PRAGMA foreign_key_list('product')",
        "SELECT name FROM pragma_table_info('product')",
        "SELECT m.name, p.name FROM sqlite_master AS m, pragma_table_info(m.name) AS p",
        "SELECT sql FROM sqlite_master",
        "EXPLAIN QUERY PLAN SELECT * FROM product",
        "SELECT value FROM json_each('[1, 2]')",
    ],
)
def test_the_schema_can_be_looked_at(pool: WorkerPool, shop: Path, sql: str) -> None:
    result = pool.query(shop, sql, **LIMITS)
    assert result.error is None
    assert result.columns


@pytest.mark.parametrize(
    ("sql", "limits"),
    [
        (ENDLESS, {"timeout": 0.2}),
        ("SELECT count(*) FROM product a, product b, product c, product d, product e, product f, product g,"
         " product h, product i, product j, product k, product l", {"timeout": 0.2}),
        ("WITH RECURSIVE r(x) AS (SELECT randomblob(1000000) UNION SELECT randomblob(1000000) FROM r)"
         " SELECT count(*) FROM r", {}),
        ("WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 90)"
         " SELECT count(*) FROM (SELECT zeroblob(15000000 + x) AS z FROM r ORDER BY z)", {}),
    ],
)  # fmt: skip
def test_time_and_memory_are_limited(pool: WorkerPool, shop: Path, sql: str, limits: dict[str, Any]) -> None:
    result = pool.query(shop, sql, **{**LIMITS, **limits})
    assert result.fault == "limit"
    assert "exceeded" in str(result.error)


@pytest.mark.parametrize("sql", ["SELECT randomblob(1e9)", "SELECT hex(zeroblob(1000000000))", "SELECT zeroblob(2e9)"])
def test_huge_values_are_refused(pool: WorkerPool, shop: Path, sql: str) -> None:
    assert pool.query(shop, sql, **LIMITS).error == "string or blob too big"


def test_rows_bytes_and_cells_are_cut(pool: WorkerPool, shop: Path) -> None:
    endless = ENDLESS.replace("count(*)", "*")
    result = pool.query(shop, endless, timeout=5.0, max_rows=7, max_bytes=1 << 20)
    assert (len(result.rows), result.more) == (7, True)
    result = pool.query(
        shop, f"SELECT hex(zeroblob(500)) FROM ({endless})", timeout=5.0, max_rows=10**6, max_bytes=10_000
    )
    assert len(result.rows) <= 11
    assert result.more
    result = pool.query(shop, "SELECT hex(zeroblob(500)), zeroblob(500)", **LIMITS, max_cell=10)
    assert result.rows == [("0000000000… (1000 characters)", bytes(10))]
    exact = pool.query(shop, "SELECT id FROM product", timeout=5.0, max_rows=5, max_bytes=1 << 20)
    assert (len(exact.rows), exact.more) == (5, False)


def test_a_query_that_cannot_be_interrupted_is_killed_and_the_worker_replaced(own_pool: WorkerPool, shop: Path) -> None:
    own_pool.query(shop, "SELECT 1", **LIMITS)
    (before,) = own_pool.processes
    result = own_pool.query(shop, NEVER_CHECKED, timeout=0.2, max_rows=1, max_bytes=1000)
    assert result.fault == "limit"
    assert not psutil.pid_exists(before)
    assert own_pool.query(shop, "SELECT 1", **LIMITS).rows == [(1,)]
    assert own_pool.processes != [before]


def test_a_worker_that_dies_of_itself_is_no_fault_of_the_query(own_pool: WorkerPool, shop: Path) -> None:
    own_pool.query(shop, "SELECT 1", **LIMITS)
    (worker,) = own_pool.processes
    killer = threading.Timer(0.2, os.kill, (worker, signal.SIGKILL))
    killer.start()
    with pytest.raises(EnvError, match="a query worker died"):
        own_pool.query(shop, ENDLESS, **LIMITS)
    killer.join()
    assert own_pool.query(shop, "SELECT 1", **LIMITS).rows == [(1,)]


def test_a_worker_that_died_idle_is_replaced(own_pool: WorkerPool, shop: Path) -> None:
    own_pool.query(shop, "SELECT 1", **LIMITS)
    (worker,) = own_pool.processes
    os.kill(worker, signal.SIGKILL)
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert own_pool.query(shop, "SELECT 1", **LIMITS).rows == [(1,)]


def test_databases_that_cannot_be_read_are_no_fault_of_the_query(
    pool: WorkerPool, tmp_path: Path, make_database: Callable[..., Path]
) -> None:
    noise = tmp_path / "noise.sqlite"
    noise.write_bytes(b"this is no database" * 1000)
    torn = make_database(path=tmp_path / "torn.sqlite")
    torn.write_bytes(torn.read_bytes()[:100] + b"\xff" * (torn.stat().st_size - 100))
    unfinished = make_database(path=tmp_path / "unfinished.sqlite")
    unfinished.with_name("unfinished.sqlite-wal").write_bytes(b"something")
    for path in (tmp_path / "missing.sqlite", noise, torn, unfinished, tmp_path):
        with pytest.raises(EnvError, match="the database cannot be read"):
            pool.query(path, "SELECT * FROM product", **LIMITS)
    assert not (tmp_path / "missing.sqlite").exists()


def test_odd_paths_are_found(pool: WorkerPool, tmp_path: Path, make_database: Callable[..., Path]) -> None:
    path = make_database(path=tmp_path / "a b?c#d%20é" / "x.sqlite")
    assert pool.query(path, "SELECT count(*) FROM product", **LIMITS).rows == [(5,)]


def test_threads_share_the_workers(pool: WorkerPool, shop: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: pool.query(shop, f"SELECT {n}", **LIMITS).rows, range(160)))
    assert results == [[(n,)] for n in range(160)]
    assert len(pool.processes) <= 2


def _query_in_child(pool: WorkerPool, shop: Path, pipe: Any) -> None:
    pipe.send((pool.query(shop, "SELECT 41 + 1", **LIMITS).rows, pool.processes))


def test_a_forked_process_gets_workers_of_its_own(own_pool: WorkerPool, shop: Path) -> None:
    own_pool.query(shop, "SELECT 1", **LIMITS)
    ours = own_pool.processes
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_query_in_child, args=(own_pool, shop, there))
    child.start()
    assert here.poll(60)
    rows, theirs = here.recv()
    child.join(60)
    assert rows == [(42,)]
    assert set(theirs).isdisjoint(ours)
    assert own_pool.query(shop, "SELECT 2", **LIMITS).rows == [(2,)]
    assert own_pool.processes == ours


def test_closing_ends_the_workers_and_what_they_run(shop: Path) -> None:
    pool = WorkerPool(size=2, memory_mb=64)
    pool.query(shop, "SELECT 1", **LIMITS)
    errors: list[Exception] = []

    def run() -> None:
        try:
            pool.query(shop, ENDLESS, timeout=30.0, max_rows=1, max_bytes=1000)
        except EnvError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    processes = pool.processes
    pool.close()
    thread.join(20)
    assert len(errors) == 1
    assert processes
    assert not any(psutil.pid_exists(process) for process in processes)
    with pytest.raises(EnvError, match="closed"):
        pool.query(shop, "SELECT 1", **LIMITS)
    pool.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_has_nothing_of_ours(own_pool: WorkerPool, shop: Path) -> None:
    own_pool.query(shop, "SELECT 1", **LIMITS)
    process = psutil.Process(own_pool.processes[0])
    assert process.environ() == {}
    assert process.cwd() == "/"
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    assert "numpy" not in loaded
    assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert process.rlimit(psutil.RLIMIT_AS)[0] == 2 * (64 << 20) + (128 << 20)
