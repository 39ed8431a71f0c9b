"""A server with `/v1/completions` that takes and gives token ids (vLLM, and servers that follow it)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stepgym.env.worker import threads
from stepgym.errors import EngineError, EngineTimeout, UserError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.engines.endpoint import Endpoint
from stepgym.model.engines.vllm.dialect import read_logprob, sampling_fields
from stepgym.record.step import Ids, Sampling, WeightsSpan

FINISH_REASONS = ("stop", "length", "abort")
NOT_OFFERED = (400, 404, 405, 415, 422, 501)


class NoTokenIds(UserError):
    """The endpoint answers, but does not take or give token ids."""


class OpenAIEngine(Engine):
    """Sends prompts as token ids to `/v1/completions` and takes token ids back (`return_token_ids`).

    The server never renders anything: no chat template, no special tokens. Every setting of the sampling is sent, so
    that defaults of the server or of the model's generation config cannot creep in. Every answer is checked; one that
    lacks ids or logprobs is an `EngineError`.

    Args:
        base_url: Address of the server's `/v1`, as in `http://localhost:8000/v1`.
        model: Name under which the server serves the model.
        tokenizer: Folder or hub name of the model's tokenizer; None: the same as `model`.
        api_key: Key of the endpoint; None reads the environment variable OPENAI_API_KEY.
        logprobs_kind: What the server's logprobs are. vLLM gives `processed` ones (log-softmax of logits /
            temperature) only when started with `--logprobs-mode processed_logprobs`, else `raw`. Training needs
            processed ones.
        context_length: Most tokens, prompt and response together; None: what the server says, if it does.
        request_timeout: Seconds for one answer.
        max_connections: Requests under way at once; more of them wait.
        retries: How often a request is sent again after a refused or broken connection, HTTP 408, 429 or 5xx.
        weights_version: Name of the weights that the server has, recorded with every response.
    """

    kind: ClassVar[str] = "openai"

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        tokenizer: str | None = None,
        api_key: str | None = None,
        logprobs_kind: Literal["processed", "raw", "unknown"] = "unknown",
        context_length: int | None = None,
        request_timeout: float = 600.0,
        max_connections: int = 256,
        retries: int = 3,
        weights_version: str = "",
    ) -> None:
        self.model = model
        self.logprobs_kind = logprobs_kind
        self.context_length = context_length
        self.weights_version = weights_version
        self._tokenizer_name = tokenizer or model
        self._tokenizer: Any = None
        self._endpoint = Endpoint(
            base_url=base_url,
            api_key=api_key,
            request_timeout=request_timeout,
            max_connections=max_connections,
            retries=retries,
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `EngineError` before `open`."""
        if self._tokenizer is None:
            raise EngineError("the engine is not open: await engine.open() first")
        return self._tokenizer

    async def open(self) -> None:
        """Load the tokenizer, look for the model, and try one token.

        Raises `UserError` where the server cannot be reached, refuses the key, does not serve the model, or does not
        take and give token ids.
        """
        if self._tokenizer is not None:
            return
        found = await self._endpoint.find_model(self.model)
        longest = found.get("max_model_len")
        if self.context_length is None and isinstance(longest, int):
            self.context_length = longest
        tokenizer = await threads.run(load_tokenizer, self._tokenizer_name)
        await self._probe()
        self._tokenizer = tokenizer

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

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
        """Continue a prompt; see `Engine.generate`."""
        return await self.generate_as(
            prompt_ids,
            sampling,
            model=self.model,
            version=self.weights_version,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )

    async def generate_as(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        model: str,
        version: str,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        salt: str = "",
    ) -> Completion:
        """`generate`, from the model of that name (an adapter's, say), whose weights have that version.

        Where a `salt` is given, the server shares cached prefixes only among requests with the same one.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt.tolist(),
            "n": 1,
            "logprobs": 1,
            "return_token_ids": True,
            **sampling_fields(sampling, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids, seed=seed),
        }
        if salt:
            body["cache_salt"] = salt
        asked = time.perf_counter()
        answer = await self._endpoint.post("completions", body)
        return self._read(answer, prompt, max_tokens, version, time.perf_counter() - asked)

    def _read(self, answer: dict[str, Any], prompt: Ids, max_tokens: int, version: str, seconds: float) -> Completion:
        """The completion in a server's answer. Raises `EngineError` for one that does not hold together."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._wrong("gave no choice, or several")
        choice = choices[0]
        ids = self._ids(choice.get("token_ids"), "token_ids")
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and not np.array_equal(self._ids(echoed, "prompt_token_ids"), prompt):
            raise self._wrong("changed the prompt: the ids it says it was sent are not those that were sent")
        if len(ids) > max_tokens:
            raise self._wrong(f"gave {len(ids)} tokens where {max_tokens} were asked for")
        reason = choice.get("finish_reason")
        if len(ids) == 0 and reason != "stop":  # a model may have nothing to say; a server that was cut off has not
            raise self._wrong(f"gave an empty response ({reason})")
        if reason not in FINISH_REASONS:
            raise self._wrong(f"finished for an unknown reason: {reason!r}")
        spans: list[WeightsSpan] = [(version, 0, len(ids))] if version else []
        return Completion(
            response_ids=ids,
            logprobs=self._logprobs(choice.get("logprobs"), len(ids)),
            finish_reason=reason,
            weights_versions=spans,
            metrics={"request_s": seconds},
        )

    def _ids(self, value: object, name: str) -> Ids:
        if not isinstance(value, list):
            raise self._wrong(f"gave no {name} (it must know return_token_ids, as vLLM does)")
        if not all(type(i) is int and 0 <= i < 2**31 for i in value):
            raise self._wrong(f"gave {name} that are not token ids")
        return np.array(value, dtype=np.int32)

    def _logprobs(self, value: object, count: int) -> NDArray[np.float32]:
        given = value.get("token_logprobs") if isinstance(value, dict) else None
        if not isinstance(given, list):
            raise self._wrong("gave no logprobs")
        if len(given) != count:
            raise self._wrong(f"gave {len(given)} logprobs for {count} tokens")
        # Minus infinity is recorded as what it is: a token that cannot have been sampled. "Not a number" is nothing.
        if not all(isinstance(x, int | float) and not math.isnan(x) and x < 1e-3 for x in given):
            raise self._wrong("gave logprobs that are not log-probabilities")
        return np.array([read_logprob(x) for x in given], dtype=np.float32)

    def _wrong(self, what: str) -> EngineError:
        return EngineError(f"{self._endpoint.base_url}/completions {what}")

    async def _probe(self) -> None:
        """Ask for one token. Raises `NoTokenIds` where ids are not taken or not given."""
        try:
            await self.generate(np.array([1], dtype=np.int32), Sampling(), max_tokens=1, seed=0)
        except EngineError as error:
            status = getattr(error.__cause__, "status_code", None)
            if isinstance(error, EngineTimeout) or (error.__cause__ and status not in NOT_OFFERED):
                raise UserError(f"engine: {error}") from error
            raise NoTokenIds(
                f"engine: {error}; this engine needs /v1/completions with token ids: use the engine 'chat' "
                "(--api chat) for endpoints that only speak chat"
            ) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or hub name. Raises `UserError` where there is none."""
    import transformers

    hf: Any = transformers
    try:
        return hf.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"engine: the tokenizer {name!r} cannot be loaded: {text:.300}") from error
