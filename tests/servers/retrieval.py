"""Retrieval servers for tests: a real application that really listens, and one that does whatever it is told to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn


@dataclass
class RunningApp:
    """An application in a thread of this process, on a free port of the loopback interface."""

    url: str
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)


def serve(app: Any, port: int = 0) -> RunningApp:
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the test server did not start")
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    return RunningApp(f"http://127.0.0.1:{port}", server, thread)


Behaviour = Callable[[socket.socket, Any], None]


class RawServer:
    """Hands each request, as the connection and the JSON of the body, to `behave`, which writes what it likes.

    A connection is closed when `behave` returns. `requests` has the JSON of all requests, `headers` their headers.
    """

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            pass
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            stream.readline()
            headers: dict[str, str] = {}
            while line := stream.readline().decode().strip():
                key, _, value = line.partition(":")
                headers[key.lower()] = value.strip()
            body = stream.read(int(headers.get("content-length", 0)))
            if not body:
                return
            self.headers.append(headers)
            self.requests.append(json.loads(body))
            try:
                self.behave(connection, self.requests[-1])
            except OSError:
                pass  # the client has left


def answer(status: int, content: Any, **headers: str) -> bytes:
    """An answer as bytes; content that is not bytes is written as JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(data)}", "connection: close"]
    lines += [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def answers(*replies: bytes) -> Behaviour:
    """Sends one reply after another, the last one for ever; an empty one closes the connection without a word."""
    left = list(replies)
    lock = threading.Lock()

    def behave(connection: socket.socket, request: Any) -> None:
        with lock:
            reply = left.pop(0) if len(left) > 1 else left[0]
        connection.sendall(reply)

    return behave
