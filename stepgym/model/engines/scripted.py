"""An engine that says what a script says: experts play through the same recorder as models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from stepgym.errors import EngineError
from stepgym.model.engines.base import Completion, Engine
from stepgym.record.step import Ids, SamplerKind, Sampling

Script = Iterable[Mapping[str, Any] | str]


class ScriptedEngine(Engine):
    """Answers with the messages of a script, one per call, encoded as the model would have sampled them.

    The script is advanced lazily, so an environment's expert may look at what has happened. It serves one episode.

    Args:
        script: Assistant messages, or strings that stand for one.
        encode: Gives a message's ids, terminator included where no stop string ends it.
        tokenizer: The tokenizer that `encode` uses.
    """

    kind: ClassVar[str] = "scripted"
    sampler: SamplerKind = "scripted"
    model = "scripted"

    def __init__(
        self, script: Script, *, encode: Callable[[Mapping[str, Any] | str], Sequence[int] | Ids], tokenizer: Any = None
    ) -> None:
        self._script: Iterator[Mapping[str, Any] | str] = iter(script)
        self._encode = encode
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the script is encoded with."""
        return self._tokenizer

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
        """The next message of the script, cut at `max_tokens`. Raises `EngineError` when there is none."""
        try:
            message = next(self._script)
        except StopIteration:
            raise EngineError("the script has no more messages") from None
        ids = np.asarray(self._encode(message), dtype=np.int32)
        cut = len(ids) > max_tokens
        return Completion(response_ids=ids[:max_tokens], logprobs=None, finish_reason="length" if cut else "stop")
