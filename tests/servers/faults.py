"""An ASGI middleware for a vLLM server: requests that take long or fail when a test says so, and a log of all of them.

A test gives it to real servers (`--middleware faults.Faults`, FAULTS=FOLDER) and controls them by files in that folder,
`PORT.json` for one server or `all.json`, both read for every request:
`{"slow": {route: seconds}, "fail": {route: text}}`. A slow request waits before the server sees it, until its time is
over, its route is slow no longer, or whoever asked is gone. One with that text in its body gets HTTP 500, and the
server never sees it. The request of one token that every engine opens with is never slow. `log.jsonl` has a line for
each POST, from the moment it arrives: `{"port", "path" (with its query), "body"}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any


class Faults:
    def __init__(self, app: Any) -> None:
        self.app = app
        self.folder = Path(os.environ["FAULTS"])

    def told(self, port: int, key: str, none: Any) -> Any:
        for name in (str(port), "all"):
            path = self.folder / f"{name}.json"
            if path.exists():
                return json.loads(path.read_text(encoding="utf-8")).get(key, none)
        return none

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        port, route = scope["server"][1], scope["path"]
        heard, gone, data = [], None, b""
        if scope["method"] == "POST":
            heard.append(await receive())
            while heard[-1].get("more_body"):
                heard.append(await receive())
            data = b"".join(event.get("body", b"") for event in heard)
            body = json.loads(data or b"{}")
            query = "?" + scope["query_string"].decode() if scope["query_string"] else ""
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({"port": port, "path": route + query, "body": body}) + "\n")
            arrived = time.monotonic()
            gone = asyncio.ensure_future(receive())  # after the body comes nothing but the end of the connection
            slow = len(body.get("token_ids", "  ")) > 1
            while slow and time.monotonic() - arrived < self.told(port, "slow", {}).get(route, 0):
                await asyncio.wait([gone], timeout=0.01)
                if gone.done():
                    return
        text = self.told(port, "fail", {}).get(route)
        if text is not None and text.encode() in data:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 500, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "told to fail"}'})
            return

        async def replay() -> Any:
            return heard.pop(0) if heard else await (receive() if gone is None else asyncio.shield(gone))

        await self.app(scope, replay, send)
