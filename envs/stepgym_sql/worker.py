"""The process that runs queries: reads requests from standard input and writes replies to standard output.

A message is four bytes of length (big-endian) and that many bytes of JSON. The process sets limits on its own memory,
processor time and files before it reads the first request; it imports neither stepgym nor anything outside the
standard library, and is started without the site packages. It ends when its standard input does.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
from collections import OrderedDict
from typing import Any

from stepgym_sql.database import Database, DatabaseUnreadableError

OPEN_DATABASES = 16
MEMORY_EXIT = 77
"""Exit status of a worker whose own memory ran out while it served a request."""


def read_message(descriptor: int) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream."""
    header = _read_exactly(descriptor, 4)
    if header is None:
        return None
    body = _read_exactly(descriptor, struct.unpack(">I", header)[0])
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def write_message(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message whole."""
    # ASCII JSON carries lone surrogates (bytes that are not UTF-8) through unharmed.
    body = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    chunks = []
    while count:
        chunk = os.read(descriptor, min(count, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


class Server:
    """Serves requests one after the other, with a few databases kept open."""

    def __init__(self, heap_bytes: int) -> None:
        self._heap_bytes = heap_bytes
        self._open: OrderedDict[str, Database] = OrderedDict()

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request: what `Database.run` returns, or `{"error", "fault": "database"}`."""
        path = request["database"]
        _allow_processor_time(request["timeout"])
        try:
            return self._database(path).run(
                request["sql"],
                timeout=request["timeout"],
                max_rows=request["max_rows"],
                max_bytes=request["max_bytes"],
                max_cell=request["max_cell"],
            )
        except DatabaseUnreadableError as fault:
            self._forget(path)
            return {"error": str(fault), "fault": "database"}
        except MemoryError:
            self._forget(path)
            return {"error": "the query exceeded its memory limit", "fault": "limit"}

    def _database(self, path: str) -> Database:
        database = self._open.pop(path, None) or Database(path, heap_bytes=self._heap_bytes)
        self._open[path] = database
        while len(self._open) > OPEN_DATABASES:
            self._open.popitem(last=False)[1].close()
        return database

    def _forget(self, path: str) -> None:
        database = self._open.pop(path, None)
        if database is not None:
            database.close()


def _allow_processor_time(seconds: float) -> None:
    """Let the kernel end this process if its parent is gone and a single SQLite operation never returns."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _limit_process(memory_bytes: int) -> None:
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64)]
    if sys.platform.startswith("linux"):  # other systems accept an address-space limit and ignore it, or refuse it
        limits.append((resource.RLIMIT_AS, memory_bytes))
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def main() -> None:
    """Serve until standard input ends. Arguments: SQLite's heap limit and the address-space limit, in bytes."""
    heap_bytes, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    replies = os.dup(1)
    os.dup2(2, 1)  # nothing but replies ever goes down the reply pipe
    _limit_process(memory_bytes)
    server = Server(heap_bytes)
    try:
        write_message(replies, {"ready": os.getpid()})
        while (request := read_message(0)) is not None:
            write_message(replies, server.serve(request))
    except BrokenPipeError:
        pass  # the parent is gone
    except MemoryError:
        os._exit(MEMORY_EXIT)
