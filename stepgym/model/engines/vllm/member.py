"""One server of several: the line to it, and who is using it."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import EngineError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.engines.endpoint import Endpoint
from stepgym.model.engines.openai import FINISH_REASONS, OpenAIEngine
from stepgym.model.engines.vllm import dialect
from stepgym.model.engines.vllm.server import VLLMServer
from stepgym.record.step import Ids, Sampling, WeightsSpan

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""Name under which our servers serve the model, whatever weights they have."""

NOT_OFFERED = (403, 404, 405, 501)
"""HTTP statuses of a route that a server does not have, or was not started with."""

_NOTICE_S = 5.0
"""Seconds within which the watch has noticed that a server died, after a request to it failed."""


@dataclass(frozen=True, slots=True)
class WeightsName:
    """What the weights on a server are called.

    Attributes:
        version: Their version.
        adapter: Whether they are those of a LoRA adapter over the server's own.
    """

    version: str
    adapter: bool = False

    @property
    def model(self) -> str:
        """Name of the model in a request for a response from these weights."""
        return f"{MODEL_NAME}-{self.version}" if self.adapter else MODEL_NAME


class Member:
    """A server, the connections to it, and the episodes and requests that are on it.

    Args:
        server: The server.
        line: Options of the `Endpoint`: `request_timeout`, `max_connections`, `retries`.

    Attributes:
        api: Where responses come from.
        lines: The episodes that stick to it; one that has ended is forgotten.
        under_way: Number of requests.
    """

    def __init__(self, server: VLLMServer, **line: Any) -> None:
        self.server = server
        self.api: Literal["generate", "completions"] = "generate"
        self.endpoint = Endpoint(base_url=f"{server.url}/v1", api_key="none", **line)
        self.lines: WeakSet[Engine] = WeakSet()
        self.under_way = 0
        self._completions = OpenAIEngine(
            base_url=f"{server.url}/v1", model=MODEL_NAME, api_key="none", logprobs_kind="processed", **line
        )

    async def open(self, api: Literal["auto", "generate", "completions"]) -> dict[str, Any]:
        """Wait until the server answers, and find out what it offers. Returns what it says about its model.

        Raises `EngineError` where it is dead, `UserError` where it does not serve the model.
        """
        await self.server.ready()
        found = await self.endpoint.find_model(MODEL_NAME)
        if api != "auto":
            self.api = api
        else:
            self.api = "generate" if await self._offers_generate() else "completions"
        logger.info("%s: responses come from %s", self.server.url, self.api)
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()
        await self._completions.close()

    async def ask(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        weights: WeightsName,
        *,
        max_tokens: int,
        stop: Sequence[str],
        stop_token_ids: Sequence[int],
        seed: int | None,
    ) -> Completion:
        """One response. Raises `EngineError`, `EngineTimeout`, `ContextOverflow`."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "seed": seed,
            "salt": weights.version,
        }
        self.under_way += 1
        try:
            if self.api == "completions":
                return await self._completions.generate_as(
                    prompt, sampling, model=weights.model, version=weights.version, **options
                )
            asked = time.perf_counter()
            body = dialect.generate_body(weights.model, prompt.tolist(), sampling, **options)
            answer = await self.endpoint.post(dialect.GENERATE, body)
            return self._read(answer, len(prompt), max_tokens, weights, time.perf_counter() - asked)
        finally:
            self.under_way -= 1

    def _read(
        self, answer: dict[str, Any], prompt_length: int, max_tokens: int, weights: WeightsName, seconds: float
    ) -> Completion:
        where = self.server.url + dialect.GENERATE
        try:
            said = dialect.read_generated(answer)
        except ValueError as error:
            raise EngineError(f"{where} {error}") from None
        if said.finish_reason not in FINISH_REASONS:
            raise EngineError(f"{where} finished for an unknown reason: {said.finish_reason!r}")
        if len(said.ids) > max_tokens:
            raise EngineError(f"{where} gave {len(said.ids)} tokens where {max_tokens} were asked for")
        if not said.ids and said.finish_reason != "stop":
            raise EngineError(f"{where} gave an empty response ({said.finish_reason})")
        # An adapter's version is in its name; the server only knows the version of the weights under it.
        spans: list[WeightsSpan] = [(weights.version, 0, len(said.ids))] if weights.adapter else said.versions
        return Completion(
            response_ids=np.array(said.ids, dtype=np.int32),
            logprobs=np.array(said.logprobs, dtype=np.float32),
            finish_reason=said.finish_reason,
            weights_versions=spans,
            routed_experts=_experts(said.routed_experts, prompt_length + len(said.ids)),
            metrics={"request_s": seconds},
        )

    async def _offers_generate(self) -> bool:
        """Whether the server has the route that says which weights sampled each token."""
        none: dict[str, Any] = {"stop": (), "stop_token_ids": (), "seed": 0, "salt": ""}
        body = dialect.generate_body(MODEL_NAME, [1], Sampling(), max_tokens=1, **none)
        try:
            dialect.read_generated(await self.endpoint.post(dialect.GENERATE, body))
        except EngineError as error:
            if getattr(error.__cause__, "status_code", None) in NOT_OFFERED:
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


def may_be_death(error: EngineError) -> bool:
    """Whether a request may have failed because its server is dying: no connection, or an error of the server's own."""
    cause = error.__cause__
    return cause is not None and getattr(cause, "status_code", 500) >= 500


def _experts(text: str | None, tokens: int) -> NDArray[np.int16] | None:
    """int16 [tokens, layers, k] from an array in base64, which lacks the last token: it was never put in."""
    if not text:
        return None
    given = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False).astype(np.int16)
    experts = np.full((tokens, *given.shape[1:]), -1, dtype=np.int16)
    experts[: len(given)] = given
    return experts
