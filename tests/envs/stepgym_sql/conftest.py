from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from stepgym_sql.env import SQLEnv
from stepgym_sql.pool import WorkerPool

from stepgym.env.shared import close_shared

SHOP = (
    "CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT, kind TEXT, price REAL, stock INTEGER)",
    "INSERT INTO product VALUES (1,'Velor','toy',2.5,4), (2,'Brisk','toy',4.0,0), (3,'Nimbo','tool',4.0,NULL),"
    " (4,'Tarka','tool',10.25,7), (5,'Oxana',NULL,1.0,7)",
)


@pytest.fixture(scope="session")
def make_database(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a database: make_database(statements, path=None) -> its path."""

    def make(statements: Sequence[str] = SHOP, path: Path | None = None) -> Path:
        path = path or tmp_path_factory.mktemp("database") / "shop.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()
        return path

    return make


@pytest.fixture(scope="session")
def shop(make_database: Callable[..., Path]) -> Path:
    return make_database()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(size=2, memory_mb=64)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SQLEnv)
