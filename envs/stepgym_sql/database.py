"""One SQLite database opened for reading only, and one query run on it within limits.

This module runs inside a worker process and imports the standard library only, so that a worker starts quickly.
Four things keep a query in its place: the file is opened read-only and immutable, an authorizer allows nothing but
reading, SQLite's own limits bound every value and the heap, and a progress handler stops what takes too long. What
still does not stop is killed from outside (see `pool`).
"""

from __future__ import annotations

import os
import sqlite3
import time
from typing import Any
from urllib.parse import quote

READABLE_PRAGMAS = frozenset(
    {
        "collation_list",
        "foreign_key_list",
        "index_info",
        "index_list",
        "index_xinfo",
        "table_info",
        "table_list",
        "table_xinfo",
    }
)
"""Pragmas that only describe the database. `database_list` is not among them: it shows paths of this machine."""

FORBIDDEN_FUNCTIONS = frozenset(
    {"edit", "fts3_tokenizer", "load_extension", "readfile", "sqlite_log", "writefile", "zipfile"}
)

MAX_VALUE_BYTES = 16_000_000
MAX_SQL_BYTES = 200_000
_INSTRUCTIONS_PER_CHECK = 5_000

_TABLE_FUNCTIONS = (
    *(f"pragma_{name}" for name in sorted(READABLE_PRAGMAS - {"collation_list"})),
    "json_each",
    "json_tree",
)
# Decided by result codes, never by the text: an identifier in the query can put any words into the text.
_DATABASE_FAULTS = frozenset(
    {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR}
)


class DatabaseUnreadableError(Exception):
    """The database itself cannot be read: never the fault of whoever sent the query."""


class Authorizer:
    """Allows reading and nothing else; remembers what it refused, so that the message can say it."""

    def __init__(self) -> None:
        self.refused: str | None = None

    def __call__(
        self, action: int, first: str | None, second: str | None, database: str | None, source: str | None
    ) -> int:
        """The answer to SQLite's question whether a compiled statement may do `action`."""
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION:
            if (second or "").lower() not in FORBIDDEN_FUNCTIONS:
                return sqlite3.SQLITE_OK
            self.refused = f"the function {second}"
        elif action == sqlite3.SQLITE_PRAGMA:
            if (first or "").lower() in READABLE_PRAGMAS:
                return sqlite3.SQLITE_OK
            self.refused = f"PRAGMA {first}"
        else:
            self.refused = "this statement"
        return sqlite3.SQLITE_DENY


class Database:
    """A read-only connection.

    Args:
        path: The database file.
        heap_bytes: SQLite's hard heap limit, shared by all connections of the process.

    Raises:
        DatabaseUnreadableError: The file is missing, is not a database, or has an unfinished write-ahead log.
    """

    def __init__(self, path: str, *, heap_bytes: int) -> None:
        try:
            pending = os.path.getsize(path + "-wal")
        except OSError:
            pending = 0
        if pending:
            raise DatabaseUnreadableError(
                f"{path} has an unfinished write-ahead log: open and close it once with sqlite3"
            )
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(path)}?mode=ro&immutable=1", uri=True, isolation_level=None, cached_statements=16
            )
            self._prepare(heap_bytes)
        except sqlite3.Error as error:
            raise DatabaseUnreadableError(f"{path}: {error}") from None

    def _prepare(self, heap_bytes: int) -> None:
        connection = self._connection
        # Bytes that are not UTF-8 survive as lone surrogates: they compare as they are and are shown as U+FFFD.
        connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        connection.execute(f"PRAGMA hard_heap_limit = {int(heap_bytes)}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA mmap_size = 0")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        for function in _TABLE_FUNCTIONS:
            # The first use of one declares a virtual table, which the authorizer would have to refuse.
            try:
                connection.execute(f"SELECT 1 FROM {function}('')")
            except sqlite3.OperationalError:
                pass  # this SQLite was built without it
        for limit, value in (
            (sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
            (sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_SQL_BYTES),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
            (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
            (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 500),
            (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 200),
            (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 10_000),
        ):
            connection.setlimit(limit, value)
        if hasattr(connection, "enable_load_extension"):
            connection.enable_load_extension(False)
        self._authorizer = Authorizer()
        connection.set_authorizer(self._authorizer)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def run(
        self, sql: str, *, timeout: float, max_rows: int, max_bytes: int, max_cell: int | None = None
    ) -> dict[str, Any]:
        """Run one statement.

        Args:
            sql: The statement; a second one is an error.
            timeout: Seconds after which it is stopped.
            max_rows: Rows after which reading stops.
            max_bytes: Bytes (estimated, 32 for each value and what a text or blob holds) after which reading stops.
            max_cell: Characters or bytes after which a text or blob is cut, None for never.

        Returns:
            `{"columns", "rows", "more"}`, where `more` says that reading stopped at a limit; or `{"error", "fault"}`
            with fault `sql` (the statement is wrong) or `limit` (it took too much time or memory).

        Raises:
            DatabaseUnreadableError: The database cannot be read.
        """
        deadline = time.monotonic() + timeout
        self._authorizer.refused = None
        self._connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS_PER_CHECK)
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
            if cursor.description is None:
                return {"error": "the query returns no table: write one SELECT statement", "fault": "sql"}
            rows: list[list[Any]] = []
            columns = [column[0] for column in cursor.description]
            size, more = 0, False
            for row in cursor:
                if len(rows) >= max_rows or size > max_bytes:
                    more = True
                    break
                cells = [_wire(value, max_cell) for value in row]
                size += sum(32 + (len(value) if isinstance(value, str | bytes) else 0) for value in row)
                rows.append(cells)
                if time.monotonic() > deadline:
                    return _too_slow(timeout)
            return {"columns": columns, "rows": rows, "more": more}
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            return self._explain(error, timeout)
        finally:
            cursor.close()

    def _explain(self, error: Exception, timeout: float) -> dict[str, Any]:
        text = str(error)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_INTERRUPT:
            return _too_slow(timeout)
        if self._authorizer.refused is not None and ("authoriz" in text or "prohibited" in text):
            return {"error": f"not authorized: {self._authorizer.refused} (only reading is allowed)", "fault": "sql"}
        if isinstance(error, UnicodeEncodeError):
            return {"error": "the query holds characters that are not valid text", "fault": "sql"}
        if code in _DATABASE_FAULTS:
            raise DatabaseUnreadableError(text)
        return {"error": text, "fault": "sql"}


def _too_slow(timeout: float) -> dict[str, Any]:
    return {"error": f"the query exceeded its time limit of {timeout:g} s", "fault": "limit"}


def _wire(value: Any, max_cell: int | None) -> Any:
    """A value as JSON: blobs become `{"blob": hex, "bytes": length}`, all else stands for itself."""
    if isinstance(value, bytes):
        return {"blob": (value if max_cell is None else value[:max_cell]).hex(), "bytes": len(value)}
    if isinstance(value, str) and max_cell is not None and len(value) > max_cell:
        return f"{value[:max_cell]}… ({len(value)} characters)"
    return value
