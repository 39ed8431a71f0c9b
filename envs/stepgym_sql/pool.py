"""A pool of query workers: separate processes that are killed and replaced when a query does not end in time."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stepgym.errors import EnvError
from stepgym_sql.database import MAX_SQL_BYTES
from stepgym_sql.worker import MEMORY_EXIT, read_message, write_message

logger = logging.getLogger(__name__)

Value: TypeAlias = "int | float | str | bytes | None"
Row: TypeAlias = tuple[Value, ...]

_START = "import sys; sys.path.append(sys.argv.pop(1)); from stepgym_sql.worker import main; main()"
_START_SECONDS = 60.0
_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a query gave.

    Attributes:
        columns: Names of the columns; empty after an error.
        rows: The rows, as tuples of None, int, float, str and bytes.
        more: Whether reading stopped at a limit, so that `rows` is only the beginning.
        error: One line that says why the query failed, or None.
        fault: `ok`, `sql` (the statement is wrong) or `limit` (it took too much time or memory).
        seconds: Wall time, waiting for a free worker not counted.
    """

    columns: Sequence[str] = ()
    rows: Sequence[Row] = ()
    more: bool = False
    error: str | None = None
    fault: Literal["ok", "sql", "limit"] = "ok"
    seconds: float = 0.0


class WorkerPool:
    """Runs queries in worker processes. Safe to use from many threads, and after a fork.

    Args:
        size: Most workers at a time. They are started when they are first needed.
        memory_mb: SQLite's heap limit in each worker, in MiB; the process itself may use twice that and 128 MiB.
    """

    def __init__(self, *, size: int, memory_mb: int) -> None:
        self._size = size
        self._heap_bytes = memory_mb << 20
        self._closed = False
        self._forget_workers()

    def query(
        self,
        database: str | Path,
        sql: str,
        *,
        timeout: float,
        max_rows: int,
        max_bytes: int,
        max_cell: int | None = None,
    ) -> QueryResult:
        """Run one query (see `Database.run` for the limits); waits for a free worker.

        Raises:
            EnvError: The database cannot be read, or a worker died of something that is not a limit.
        """
        if len(sql) > MAX_SQL_BYTES:
            return QueryResult(error=f"the query is longer than {MAX_SQL_BYTES} characters", fault="sql")
        request = {
            "database": os.fspath(database),
            "sql": sql,
            "timeout": timeout,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "max_cell": max_cell,
        }
        worker = self._take()
        started = time.monotonic()
        healthy = False
        try:
            reply = worker.ask(request, timeout + _GRACE_SECONDS)
            healthy = reply is not None and worker.alive
        finally:
            self._give_back(worker, healthy)
        seconds = time.monotonic() - started
        if reply is None:
            error = f"the query exceeded its time limit of {timeout:g} s and was stopped"
            return QueryResult(error=error, fault="limit", seconds=seconds)
        if reply.get("fault") == "database":
            raise EnvError(f"the database cannot be read: {reply['error']}")
        if "error" in reply:
            return QueryResult(error=reply["error"], fault=reply["fault"], seconds=seconds)
        rows = [tuple(_from_wire(value) for value in row) for row in reply["rows"]]
        return QueryResult(columns=tuple(reply["columns"]), rows=rows, more=reply["more"], seconds=seconds)

    def close(self) -> None:
        """End every worker. A query that is running ends with an `EnvError`."""
        if os.getpid() != self._process:
            self._forget_workers()
        with self._changed:
            self._closed = True
            busy, idle = self._workers - set(self._idle), list(self._idle)
            self._workers.clear()
            self._idle.clear()
            self._changed.notify_all()
        for worker in busy:
            worker.end()  # its pipes are closed by the thread that waits for it
        for worker in idle:
            worker.kill()

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers that exist now."""
        with self._changed:
            return [worker.pid for worker in self._workers]

    def _forget_workers(self) -> None:
        # Also after a fork: the parent's workers are not ours to talk to, and its locks may be held for ever.
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        for worker in getattr(self, "_workers", ()):
            worker.abandon()
        self._workers: set[_Worker] = set()
        self._starting = 0

    def _take(self) -> _Worker:
        if os.getpid() != self._process:
            self._forget_workers()
        with self._changed:
            while True:
                if self._closed:
                    raise EnvError("the query workers are closed")
                while self._idle:
                    idle = self._idle.pop()
                    if idle.alive:
                        return idle
                    logger.warning("query worker %d died while it had nothing to do; it is replaced", idle.pid)
                    self._workers.discard(idle)
                    idle.kill()
                if len(self._workers) + self._starting < self._size:
                    self._starting += 1
                    break
                self._changed.wait()
        worker: _Worker | None = None
        try:
            worker = _Worker(self._heap_bytes)
        finally:
            with self._changed:
                self._starting -= 1
                if worker is not None:
                    self._workers.add(worker)  # where the pool was closed meanwhile, it is killed when it comes back
                self._changed.notify()
        return worker

    def _give_back(self, worker: _Worker, healthy: bool) -> None:
        with self._changed:
            keep = healthy and not self._closed and worker in self._workers
            if keep:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
            self._changed.notify()
        if not keep:
            worker.kill()


class _Worker:
    """One worker process, seen from the parent. Used by one thread at a time."""

    def __init__(self, heap_bytes: int) -> None:
        package_parent = str(Path(__file__).resolve().parent.parent)
        limits = [str(heap_bytes), str(2 * heap_bytes + (128 << 20))]
        # -I -S: no user code, no site packages. An empty environment: nothing of ours to read.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, package_parent, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin.fileno()
        self._replies = self._process.stdout.fileno()
        if self._receive(_START_SECONDS) is None:
            self.kill()
            raise EnvError("a query worker did not start within a minute")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The reply, or None where there is none in time or the worker hit its own limits; then it is dead."""
        try:
            write_message(self._requests, request)
        except BrokenPipeError:
            self._explain_death()
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN | select.POLLHUP)
        if not poll.poll(seconds * 1000):
            self.kill()
            return None
        reply = read_message(self._replies)
        if reply is None:
            return self._explain_death()
        return reply

    def _explain_death(self) -> dict[str, Any] | None:
        """None for a death by limits of its own; raises `EnvError` for any other."""
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return None
        if code == MEMORY_EXIT:
            return {"error": "the query exceeded its memory limit", "fault": "limit"}
        assert self._process.stderr is not None
        last = self._process.stderr.read().decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
        raise EnvError(f"a query worker died with status {code}{': ' + last if last else ''}")

    def end(self) -> None:
        """End the process and wait until it is gone."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """End the process and close the pipes to it."""
        self.end()
        self._close_pipes()

    def abandon(self) -> None:
        """Let go of a process that belongs to the parent of a fork."""
        self._process.returncode = 0  # it is not our child: nothing to wait for
        self._close_pipes()

    def _close_pipes(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass


def _from_wire(value: Any) -> Value:
    if isinstance(value, dict):
        return bytes.fromhex(value["blob"])
    return value  # type: ignore[no-any-return]
