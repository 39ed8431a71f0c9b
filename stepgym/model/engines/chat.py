"""Endpoints that only speak chat, such as hosted APIs. They serve evaluation; nothing can be trained on them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from stepgym.errors import EngineError
from stepgym.model.engines.base import ChatCompletion, ChatEngine
from stepgym.model.engines.endpoint import Endpoint
from stepgym.record.step import Sampling

LENGTH_FIELDS: tuple[Literal["max_tokens"], Literal["max_completion_tokens"]] = ("max_tokens", "max_completion_tokens")


class OpenAIChatEngine(ChatEngine):
    """Sends messages and tools to `/v1/chat/completions`.

    Args:
        base_url: Address of the server's `/v1`, as in `http://localhost:8000/v1`.
        model: Name under which the server serves the model.
        api_key: Key of the endpoint; None reads the environment variable OPENAI_API_KEY.
        context_length: Most tokens, prompt and response together; None: what the server says, if it does.
        length_field: How the endpoint calls the most tokens of a response. `auto` says `max_tokens`, and goes over to
            `max_completion_tokens` where the endpoint asks for that.
        send_seed: Whether to send a seed; some endpoints refuse the field.
        request_timeout: Seconds for one answer.
        max_connections: Requests under way at once; more of them wait.
        retries: How often a request is sent again after a refused or broken connection, HTTP 408, 429 or 5xx.
    """

    kind: ClassVar[str] = "chat"

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str | None = None,
        context_length: int | None = None,
        length_field: Literal["auto", "max_tokens", "max_completion_tokens"] = "auto",
        send_seed: bool = True,
        request_timeout: float = 600.0,
        max_connections: int = 256,
        retries: int = 3,
    ) -> None:
        self.model = model
        self.context_length = context_length
        self._adapts = length_field == "auto"
        self._length_field = LENGTH_FIELDS[0] if length_field == "auto" else length_field
        self._send_seed = send_seed
        self._endpoint = Endpoint(
            base_url=base_url,
            api_key=api_key,
            request_timeout=request_timeout,
            max_connections=max_connections,
            retries=retries,
        )

    async def open(self) -> None:
        """Look for the model.

        Raises `UserError` where the server cannot be reached, refuses the key, or does not serve the model.
        """
        found = await self._endpoint.find_model(self.model)
        longest = found.get("max_model_len")
        if self.context_length is None and isinstance(longest, int):
            self.context_length = longest

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

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
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **_unusual(sampling),
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if stop:
            body["stop"] = list(stop)
        if seed is not None and self._send_seed:
            body["seed"] = seed
        answer = await self._post({**body, self._length_field: max_tokens}, max_tokens)
        return self._read(answer, stop)

    async def _post(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        try:
            return await self._endpoint.post("chat/completions", body)
        except EngineError as error:
            refused, other = self._length_field, LENGTH_FIELDS[1]
            if not self._adapts or refused not in body or refused == other or other not in str(error):
                raise
            self._length_field = other
        del body[refused]
        return await self._endpoint.post("chat/completions", {**body, other: max_tokens})

    def _read(self, answer: dict[str, Any], stop: Sequence[str]) -> ChatCompletion:
        """The message in a server's answer. Raises `EngineError` for one that does not hold together."""
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        given = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(given, dict):
            raise EngineError(f"{self._endpoint.base_url}/chat/completions gave no message")
        content, calls = given.get("content"), given.get("tool_calls")
        if content is not None and not isinstance(content, str):
            raise EngineError(f"{self._endpoint.base_url}/chat/completions gave content that is not text")
        if calls is not None and not isinstance(calls, list):
            raise EngineError(f"{self._endpoint.base_url}/chat/completions gave tool_calls that are not a list")
        reason = str(choice.get("finish_reason") or "stop")
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if stop and reason == "stop":
            told = ("stop_reason" in choice, choice.get("stop_reason"))
            message["content"] = put_back_stop(message["content"], stop, told=told[0], stop_reason=told[1])
        if calls:
            message["tool_calls"] = calls
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            message["reasoning_content"] = reasoning
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        return ChatCompletion(
            message=message,
            finish_reason=reason,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            response_tokens=int(usage.get("completion_tokens") or 0),
        )


def put_back_stop(content: str, stop: Sequence[str], *, told: bool = False, stop_reason: object = None) -> str:
    """The content with the stop string that ended it, where that was cut off.

    Chat endpoints cut stop strings off, and an action such as `<sql>...</sql>` would lose its end. A server that tells
    what it stopped at (`stop_reason`, as vLLM does) is believed, also when it says that it was no stop string. With
    others, a stop string `</x>` is put back if it is the only one whose `<x>` is still open at the end; a model that
    ended its turn by itself inside an open tag cannot be told apart from that.

    Args:
        content: Text of the answer, which ended with the finish reason `stop`.
        stop: The stop strings that were asked for.
        told: Whether the server has a `stop_reason`.
        stop_reason: What it says.
    """
    if told:
        if isinstance(stop_reason, str) and stop_reason in stop and not content.endswith(stop_reason):
            return content + stop_reason
        return content
    unclosed = [text for text in stop if _is_open(content, text)]
    return content + unclosed[0] if len(unclosed) == 1 else content


def _is_open(content: str, closer: str) -> bool:
    match = re.fullmatch(r"</([\w.:-]+)>", closer)
    if match is None:
        return False
    return content.rfind(f"<{match[1]}>") > content.rfind(closer)


def _unusual(sampling: Sampling) -> dict[str, float]:
    """Settings that are not neutral. Hosted endpoints refuse those that they do not know, so neutral ones stay away."""
    neutral = Sampling()
    names = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(neutral, name)}
