"""A tiny raw HTTP server that says what it is told to: refusals, garbage, silence."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    429: "Too Many",
    500: "Error",
    503: "Busy",
}


class CannedServer:
    """Answers each request with the next of `answers`, the last one for ever.

    An answer is `(status, body)` or `(status, body, headers)`; a body that is not a string is sent as JSON. None closes
    the connection without a word, a number waits that many seconds first and then closes it. A request for
    `/v1/models` gets `models` where that is given.
    """

    def __init__(self, *answers: Any, models: Any = None) -> None:
        self.answers = list(answers)
        self.models = models
        self.received: list[tuple[str, Any]] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
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
            request = stream.readline().decode().split(" ")
            headers: dict[str, str] = {}
            while line := stream.readline().decode().strip():
                key, _, value = line.partition(":")
                headers[key.lower()] = value.strip()
            body = stream.read(int(headers.get("content-length", 0)))
            if len(request) < 2:
                return
            if self.models is not None and request[1].endswith("/models"):
                answer: Any = (200, self.models)
            else:
                self.received.append((request[1], json.loads(body) if body else None))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if answer is None:
                return
            if isinstance(answer, int | float):
                time.sleep(answer)
                return
            status, content, *extra = answer
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"content-length: {len(data)}", "connection: close"]
            lines.append("content-type: " + ("text/html" if isinstance(content, str) else "application/json"))
            lines += [f"{key}: {value}" for key, value in (extra[0] if extra else {}).items()]
            connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
