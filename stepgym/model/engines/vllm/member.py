"""One server of several: the line to it, and who is using it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet

from stepgym.errors import EngineError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.engines.endpoint import Endpoint
from stepgym.model.engines.openai import OpenAIEngine
from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.server import VLLMServer
from stepgym.record.step import Ids, Sampling

_NOTICE_S = 3.0
"""Seconds within which the watch has noticed that a server died, after a request to it failed."""


class Member:
    """A server, the connections to it, and the episodes and requests that are on it.

    Args:
        server: The server.
        name: Name under which it serves the model.
        line: Options of the `Endpoint`: `request_timeout`, `max_connections`, `retries`.

    Attributes:
        lines: The episodes that stick to it; one that has ended is forgotten.
        under_way: Number of requests.
    """

    def __init__(self, server: VLLMServer, name: str, **line: Any) -> None:
        self.server = server
        self.endpoint = Endpoint(base_url=f"{server.url}/v1", api_key="none", **line)
        self.lines: WeakSet[Engine] = WeakSet()
        self.under_way = 0
        self._completions = OpenAIEngine(
            base_url=f"{server.url}/v1", model=name, api_key="none", logprobs_kind="processed", **line
        )

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Counts a request while it lasts."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    async def complete(
        self, prompt: Ids, sampling: Sampling, *, model: str, version: str, **options: Any
    ) -> Completion:
        """One response through `/v1/completions`, all of it by the weights `version`."""
        return await self._completions.generate_as(
            prompt, sampling, model=model, version=version, salt=version, **options
        )

    async def offers_generate(self) -> bool:
        """Whether the server has the route that says which weights sampled each token."""
        body = dialect.generate_body(
            self._completions.model,
            [1],
            Sampling(),
            max_tokens=1,
            stop=(),
            stop_token_ids=(),
            seed=0,
            salt="",
        )
        try:
            dialect.read_generated(await self.endpoint.post(dialect.GENERATE, body))
        except EngineError as error:
            status = getattr(error.__cause__, "status_code", None)
            if status in (403, 404, 405, 501):
                return False
            raise
        except ValueError:
            return False
        return True

    async def died(self, starts: int) -> bool:
        """Whether the server has died since its start number `starts`, and is or may be up again."""
        for _ in range(int(_NOTICE_S / 0.05)):
            if self.server.failure is not None:
                return False
            if self.server.starts != starts or not self.server.is_ready:
                return True
            await asyncio.sleep(0.05)
        return False

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()
        await self._completions.close()
