"""An ASGI middleware for a vLLM server: writes every request and answer to a file, as they passed on the wire.

A test gives it to the server (`--middleware request_log.RequestLog`, REQUEST_LOG=FILE): what it writes does not come
from anything of ours. Each line is `{"path", "request", "response"}`.
"""

from __future__ import annotations

import json
import os
from typing import Any

LOGGED = ("/inference/v1/generate", "/v1/completions")


class RequestLog:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in LOGGED or "REQUEST_LOG" not in os.environ:
            await self.app(scope, receive, send)
            return
        asked, answered = b"", b""

        async def hear() -> Any:
            nonlocal asked
            event = await receive()
            asked += event.get("body", b"")
            return event

        async def say(event: Any) -> None:
            nonlocal answered
            answered += event.get("body", b"")
            await send(event)

        await self.app(scope, hear, say)
        line = {"path": scope["path"], "request": json.loads(asked), "response": json.loads(answered)}
        with open(os.environ["REQUEST_LOG"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
