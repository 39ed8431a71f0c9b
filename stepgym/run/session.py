"""One agent's line to the model for one episode: it renders, checks, samples, records and parses."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

from stepgym.env.messages import Message
from stepgym.errors import ContextOverflow, EngineError, EngineTimeout, StepgymError
from stepgym.model.engines.base import ChatCompletion, ChatEngine, Completion, Engine
from stepgym.model.open_turn import refuse_for_chat
from stepgym.model.prompt import Prompt
from stepgym.model.renderer import Renderer, Turn
from stepgym.model.tool_calls import check_wire_calls
from stepgym.record.step import Sampling, Step, StepStatus
from stepgym.record.token_buffer import TokenBuffer
from stepgym.run.conversation import Conversation, copy_message, same_message, wire_message
from stepgym.seeds import derive_seed

LogprobsKind: TypeAlias = Literal["processed", "raw", "unknown"]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may ask of the model.

    Attributes:
        max_prompt_tokens: Longest prompt that is ever sent; None leaves it to the engine's context.
        max_response_tokens: Most tokens of one response.
        engine_timeout: Seconds for one response; None waits for ever.
    """

    max_prompt_tokens: int | None = None
    max_response_tokens: int = 1024
    engine_timeout: float | None = 600.0


class Session:
    """Chats with the model and records one `Step` for every turn.

    An agent may keep several conversations in one session: each call goes on with the conversation whose messages
    (the answer included) are how the new ones start, or begins another. A failure is sticky: after it every call
    raises it again, so an agent that swallows an exception does not change how the episode ends.

    Args:
        engine: Where responses come from.
        renderer: The model's renderer; None for a `ChatEngine`.
        sampling: How to sample.
        limits: Lengths and time.
        seed: Every turn's sampler seed is derived from it and the turn's number.

    Attributes:
        steps: The turns so far, in the order they were answered.
        failure: The error that ended the session, or None.
        prompt: What the engine is asked to answer, or was asked last; None before, and for a `ChatEngine`.

    Raises:
        UserError: A `ChatEngine` with a renderer that goes on from ids (`turns: continue`, `history: append`).
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        renderer: Renderer | None,
        *,
        sampling: Sampling | None = None,
        limits: SessionLimits | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(engine, Engine) and renderer is None:
            raise ValueError("an engine that takes token ids needs a renderer")
        if isinstance(engine, ChatEngine) and renderer is not None:
            refuse_for_chat(renderer.turns, renderer.history)
        self.engine = engine
        self.renderer = renderer
        self.sampling = sampling or Sampling()
        self.limits = limits or SessionLimits()
        self.seed = seed
        self.steps: list[Step] = []
        self.failure: StepgymError | None = None
        self.prompt: Prompt | None = None
        self._conversations: list[Conversation] = []
        self._said: dict[
            int, tuple[Message, Mapping[str, Any]]
        ] = {}  # by id of the message that was returned: it, and its copy
        self._asked = 0

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Message:
        """Sample the next assistant message of a conversation and record the turn.

        Args:
            messages: The whole conversation, from its first message.
            tools: JSON schemas of the tools on offer.
            stop: Strings that end the response; they are kept in it.
            max_tokens: Fewer than the session's `max_response_tokens`, if given.

        Returns:
            The assistant message, with `text` and, where there are any, `invalid_tool_calls`.

        Raises:
            ContextOverflow: The prompt is too long (nothing is sent then), or the response ran into the context's end.
            EngineError, EngineTimeout: The model failed.
        """
        if self.failure is not None:
            raise self.failure
        number = self._asked
        self._asked += 1
        conversation = self._find(messages)
        news = self._news(messages, conversation)
        limit = min(max_tokens or self.limits.max_response_tokens, self.limits.max_response_tokens)
        try:
            if isinstance(self.engine, ChatEngine):
                return await self._chat_turn(self.engine, conversation, news, tools, stop, limit, number)
            return await self._token_turn(self.engine, conversation, news, tools, stop, limit, number)
        except StepgymError as error:
            self.failure = error
            raise

    def recorded(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record's copy of a message that a turn returned; the message itself where no turn did."""
        _, copy = self._said.get(id(message), (None, message))
        return copy

    def step_index(self, message: Mapping[str, Any]) -> int | None:
        """Index of the last step of the conversation that holds `message`; None if no step said it."""
        _, copy = self._said.get(id(message), (None, None))
        for same, one in ((operator.is_, copy), (same_message, message)):
            for conversation in reversed(self._conversations):
                if one is not None and any(same(said, one) for said in reversed(conversation.messages)):
                    return conversation.step
        return None

    def amend_step(
        self,
        index: int,
        *,
        reward: float = 0.0,
        reward_parts: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        status: StepStatus | None = None,
    ) -> None:
        """Add what the environment said about a turn. Rewards and parts are summed with what is there already."""
        step = self.steps[index]
        parts = dict(step.reward_parts)
        for name, value in (reward_parts or {}).items():
            parts[name] = parts.get(name, 0.0) + float(value)
        self.steps[index] = replace(
            step,
            reward=step.reward + reward,
            reward_parts=parts,
            metrics={**step.metrics, **(metrics or {})},
            # A turn that was cut off stays `truncated`, whatever the environment made of what is left of it.
            status=status if status and step.status != "truncated" else step.status,
        )

    # ---- engines that take ids ----------------------------------------------------------------------------------

    async def _token_turn(
        self,
        engine: Engine,
        conversation: Conversation | None,
        news: tuple[Mapping[str, Any], ...],
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
        limit: int,
        number: int,
    ) -> Message:
        renderer = self.renderer
        assert renderer is not None
        started = time.perf_counter()
        messages = [*(conversation.messages if conversation else ()), *news]
        rewrote = self._rewrote(news)
        previous = conversation.last_turn(renderer) if conversation and not rewrote else None
        prompt = renderer.prompt(messages, tools, previous)
        if conversation is not None and prompt.extends:
            ids = conversation.going_on()
        else:
            ids = TokenBuffer(2 * len(prompt.new_ids) + limit)
        prompt_length = len(ids) + len(prompt.new_ids)
        budget, by_context = self._check_length(engine, prompt_length, limit)
        ids.append(prompt.new_ids)
        prompt_ids = ids.prefix(prompt_length)

        asked = time.perf_counter()
        self.prompt = prompt
        completion = await self._within_time(
            engine.generate(
                prompt_ids,
                self.sampling,
                max_tokens=budget,
                stop=stop,
                stop_token_ids=renderer.stop_token_ids,
                seed=derive_seed(self.seed, number),
            )
        )
        answered = time.perf_counter()
        response_ids = np.asarray(completion.response_ids, dtype=np.int32)
        ids.append(response_ids)
        message, ended = renderer.read(
            response_ids,
            stop=stop,
            tools=tools,
            id_prefix=f"call_{number}",
            opener=prompt.opener,
            reasoning_open=prompt.reasoning_open,
        )
        aborted = completion.finish_reason == "abort"
        cut = aborted or completion.finish_reason == "length"
        status: StepStatus = "truncated" if cut else "malformed" if message.get("invalid_tool_calls") else "ok"
        said = copy_message(message)
        self._record(
            message,
            Step(
                prompt_ids=prompt_ids,
                response_ids=ids.tail(prompt_length),
                logprobs=_logprobs(completion),
                sampler=engine.sampler,
                status=status,
                finish_reason=completion.finish_reason,
                new_messages=news,
                message=said,
                rendering="agent_rewrote_history" if rewrote else prompt.rendering,
                sampling=_sampled_by(self.sampling, engine.logprobs_kind),
                stop=tuple(stop),
                max_tokens=budget,
                follows=conversation.step if conversation else None,
                weights_versions=tuple(completion.weights_versions),
                routed_experts=completion.routed_experts,
                metrics={
                    "engine_s": answered - asked,
                    "loop_s": asked - started,
                    **completion.metrics,
                },
            ),
            messages,
            conversation,
            Turn(
                messages=messages,
                prompt_text=prompt.text,
                message=said,
                ended=ended,
                truncated=cut,
                tools=tuple(tools),
                opener=prompt.opener,
                appended=prompt.rendering == "appended",
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                reasoning_open=prompt.reasoning_open,
            ),
            ids,
        )
        if aborted:
            raise EngineError(f"the engine gave the response up after {len(response_ids)} tokens")
        if cut and by_context:
            raise ContextOverflow(
                f"the response ran into the end of the context after {prompt_length} prompt tokens "
                f"and {len(response_ids)} response tokens"
            )
        return message

    def _check_length(self, engine: Engine, prompt_length: int, limit: int) -> tuple[int, bool]:
        """Tokens that may be sampled, and whether the context limits them. Called after rendering, before sampling."""
        longest = self.limits.max_prompt_tokens
        if longest is not None and prompt_length > longest:
            raise ContextOverflow(f"the prompt has {prompt_length} tokens, over max_prompt_tokens = {longest}")
        if engine.context_length is None:
            return limit, False
        left = engine.context_length - prompt_length
        if left < 1:
            raise ContextOverflow(f"the prompt has {prompt_length} tokens, the context {engine.context_length}")
        return min(limit, left), left < limit

    # ---- engines that speak only chat ---------------------------------------------------------------------------

    async def _chat_turn(
        self,
        engine: ChatEngine,
        conversation: Conversation | None,
        news: tuple[Mapping[str, Any], ...],
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
        limit: int,
        number: int,
    ) -> Message:
        messages = [*(conversation.messages if conversation else ()), *news]
        asked = time.perf_counter()
        completion: ChatCompletion = await self._within_time(
            engine.chat(
                [wire_message(message) for message in messages],
                self.sampling,
                max_tokens=limit,
                tools=tools,
                stop=stop,
                seed=derive_seed(self.seed, number),
            )
        )
        calls, invalid = check_wire_calls(list(completion.message.get("tool_calls") or ()))
        content = completion.message.get("content") or ""
        message: Message = {**completion.message, "role": "assistant", "content": content, "text": content}
        message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = calls
        if invalid:
            message["invalid_tool_calls"] = invalid
        cut = completion.finish_reason == "length"
        self._record(
            message,
            Step(
                prompt_ids=None,
                response_ids=None,
                sampler=engine.sampler,
                status="truncated" if cut else "malformed" if invalid else "ok",
                finish_reason=completion.finish_reason,
                new_messages=news,
                message=copy_message(message),
                sampling=_sampled_by(self.sampling, "unknown"),
                stop=tuple(stop),
                max_tokens=limit,
                follows=conversation.step if conversation else None,
                metrics={
                    "engine_s": time.perf_counter() - asked,
                    "prompt_tokens": float(completion.prompt_tokens),
                    "response_tokens": float(completion.response_tokens),
                },
            ),
            messages,
            conversation,
            None,
            TokenBuffer(1),
        )
        return message

    # ---- shared -------------------------------------------------------------------------------------------------

    def _find(self, messages: Sequence[Mapping[str, Any]]) -> Conversation | None:
        """The longest conversation that `messages` goes on with; the latest of several."""
        best: Conversation | None = None
        for conversation in reversed(self._conversations):
            longer = best is None or len(conversation.messages) > len(best.messages)
            if longer and conversation.starts(messages):
                best = conversation
        return best

    def _news(
        self, messages: Sequence[Mapping[str, Any]], conversation: Conversation | None
    ) -> tuple[Mapping[str, Any], ...]:
        """Copies of the messages that a conversation has not had yet; of its own turns the copies that it has."""
        news = []
        for message in messages[len(conversation.messages) if conversation else 0 :]:
            _, said = self._said.get(id(message), (None, None))
            news.append(said if said is not None and said == message else copy_message(message))
        return tuple(news)

    def _rewrote(self, news: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the agent's messages hold turns of an assistant that are not the recorded ones."""
        return bool(self._conversations) and any(message.get("role") == "assistant" for message in news)

    async def _within_time(self, request: Any) -> Any:
        try:
            # Unlike `asyncio.wait_for` of Python 3.11 this makes no task of its own.
            async with asyncio.timeout(self.limits.engine_timeout):
                return await request
        except TimeoutError:
            raise EngineTimeout(f"no response within {self.limits.engine_timeout} s (engine_timeout)") from None
        except (StepgymError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error

    def _record(
        self,
        returned: Message,
        step: Step,
        messages: Sequence[Mapping[str, Any]],
        conversation: Conversation | None,
        turn: Turn | None,
        ids: TokenBuffer,
    ) -> None:
        assert step.message is not None
        if conversation is not None:
            conversation.let_text_go()
        self.steps.append(step)
        self._said[id(returned)] = (returned, step.message)
        self._conversations.append(Conversation([*messages, step.message], turn, ids, len(ids), len(self.steps) - 1))


@cache
def _sampled_by(sampling: Sampling, kind: LogprobsKind) -> Sampling:
    return replace(sampling, logprobs_kind=kind)


def _logprobs(completion: Completion) -> Any:
    if completion.logprobs is None:
        return None
    if len(completion.logprobs) != len(completion.response_ids):
        raise EngineError(
            f"the engine returned {len(completion.logprobs)} logprobs for {len(completion.response_ids)} tokens"
        )
    return np.asarray(completion.logprobs, dtype=np.float32)
