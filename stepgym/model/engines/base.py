"""What every engine is: tokens in, tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stepgym.record.step import Ids, SamplerKind, Sampling, WeightsSpan


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine returned for one prompt.

    Attributes:
        response_ids: int32 array [R], every id that was generated, stop strings and terminators included.
        logprobs: float32 array [R], or None where the engine has none.
        finish_reason: `stop` (a terminator token or a stop string), `length`, or `abort`.
        weights_versions: Spans (version, start, end) over the response.
        routed_experts: int16 array [P + R, layers, k], or None.
        metrics: Numbers about the request (seconds, token counts).
    """

    response_ids: Ids
    logprobs: NDArray[np.float32] | None
    finish_reason: str
    weights_versions: Sequence[WeightsSpan] = ()
    routed_experts: NDArray[np.int16] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What an endpoint that speaks only chat returned.

    Attributes:
        message: The assistant message in the OpenAI wire format.
        finish_reason: `stop`, `tool_calls`, `length`, `content_filter`.
        prompt_tokens, response_tokens: Counts from the endpoint's `usage`, 0 where it gave none.
    """

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int = 0
    response_tokens: int = 0


class Engine(ABC):
    """A model that continues token ids. Keyword-only constructor parameters are its config.

    Attributes:
        kind: Name in the registry.
        sampler: Whether responses come from a `policy` or from a `scripted` expert.
        logprobs_kind: What `Completion.logprobs` are (see `Sampling.logprobs_kind`).
        context_length: Most tokens, prompt and response together, that the model takes; None where unknown.
        model: Name of the model, for provenance.
        on_progress: Told, in a line that replaces the one before, how far `open` has come where it takes long; it may
            be called from another thread. None: nobody wants to know.
    """

    kind: ClassVar[str]
    on_progress: Callable[[str], None] | None = None
    sampler: SamplerKind = "policy"
    logprobs_kind: Literal["processed", "raw", "unknown"] = "processed"
    context_length: int | None = None
    model: str = ""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's `transformers` tokenizer; None for a chat engine."""

    async def open(self) -> None:
        """Connect, load, or start. Raises `UserError` for a bad model name, `EngineError` for one out of reach."""

    async def close(self) -> None:
        """Give everything back. Safe to call twice."""

    def for_episode(self) -> Engine:
        """The engine as one episode uses it. One that balances several servers keeps the episode on one of them."""
        return self

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        """Continue `prompt_ids` (int32 [P]) by at most `max_tokens` tokens.

        Stops after a terminator token of the model, after a token of `stop_token_ids` (the template's terminator where
        it is not the model's), or as soon as the text holds a string of `stop`; all are kept in the response. Raises
        `EngineError`, `EngineTimeout`, or `ContextOverflow` when the model refuses the length.
        """


class ChatEngine(ABC):
    """An endpoint that only speaks chat: it serves evaluation; its steps have no ids and cannot be trained on.

    Attributes as of `Engine`.
    """

    kind: ClassVar[str] = "chat"
    on_progress: Callable[[str], None] | None = None
    sampler: SamplerKind = "policy"
    context_length: int | None = None
    model: str = ""

    async def open(self) -> None:
        """Connect. Raises `EngineError` for an endpoint out of reach."""

    async def close(self) -> None:
        """Give everything back. Safe to call twice."""

    def for_episode(self) -> ChatEngine:
        """The engine as one episode uses it."""
        return self

    @abstractmethod
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> ChatCompletion:
        """Answer a conversation. A stop string that the endpoint cut off is put back at the end of the content."""
