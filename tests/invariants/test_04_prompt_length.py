"""Promise 4: "No prompt longer than `max_prompt_tokens` is ever sent; the check sees the prompt of *this* turn." """

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, user
from stepgym.errors import ContextOverflow
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.run.session import Session, SessionLimits


class Ledger(Engine):
    """Answers with as many tokens as it is told, never more than asked for, and keeps what it was sent."""

    kind = "ledger"

    def __init__(self, tokenizer: Any, lengths: list[int], context_length: int | None) -> None:
        self._tokenizer = tokenizer
        self._lengths = lengths
        self.context_length = context_length
        self.sent: list[tuple[int, int]] = []  # tokens of the prompt, tokens that it might sample

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt_ids: Any, sampling: Any, *, max_tokens: int, **options: Any) -> Completion:
        length = self._lengths[len(self.sent)]
        self.sent.append((len(prompt_ids), max_tokens))
        ids = [self._tokenizer.encode("a")[0]] * (length - 1) + [self._tokenizer.eos_token_id]
        cut = length > max_tokens
        return Completion(np.array(ids[:max_tokens], dtype=np.int32), None, "length" if cut else "stop")


@cache
def renderer() -> Renderer:
    return Renderer(build_tiny_tokenizer(["a b c d"] * 3))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=6),
    st.integers(5, 150),
    st.one_of(st.none(), st.integers(10, 200)),
    st.integers(1, 40),
    st.booleans(),
)
def test_no_prompt_over_the_limit_is_sent(
    turns: list[tuple[int, int]], limit: int, context: int | None, response: int, rewrites: bool
) -> None:
    engine = Ledger(renderer().tokenizer, [said for said, _ in turns], context)
    limits = SessionLimits(max_prompt_tokens=limit, max_response_tokens=response)
    session = Session(engine, renderer(), limits=limits)
    due: list[int] = []  # how long each prompt of the conversation really is, counted by the template alone

    async def play() -> ContextOverflow | None:
        messages: list[Message] = [user("a")]
        for _, observed in turns:
            due.append(exact_length(session, messages, rewrites))
            try:
                message = await session.chat(messages)
            except ContextOverflow as error:
                return error
            said = {"role": "assistant", "content": "of another mind"} if rewrites else message
            messages = [*messages, said, user("b" * observed)]
        return None

    overflow = asyncio.run(play())
    assert all(prompt <= limit for prompt, _ in engine.sent)
    assert all(context is None or prompt + budget <= context for prompt, budget in engine.sent)
    assert all(budget <= response for _, budget in engine.sent)
    # The check saw the prompt of its own turn: what was sent is as long as this turn's prompt, and a refusal without
    # a request means that this turn's prompt was too long, neither the one before nor the one after.
    assert [prompt for prompt, _ in engine.sent] == due[: len(engine.sent)]
    refused = len(due) > len(engine.sent)
    assert refused == (due[-1] > limit or (context is not None and due[-1] >= context))
    assert refused <= (overflow is not None)


def exact_length(session: Session, messages: list[Message], rewrites: bool) -> int:
    """Tokens of the prompt for `messages`: what was sampled last, as it was sampled, and the template around it."""
    text = renderer().template.apply(messages, to_sample=True)
    if not session.steps or rewrites:
        return len(renderer().encode(text))
    last = session.steps[-1]
    said = renderer().decode(last.response_ids).removesuffix("<|im_end|>")
    _, found, rest = text.rpartition(f"<|im_start|>assistant\n{said}<|im_end|>")
    assert found
    ended = int(last.response_ids[-1]) == renderer().terminator_id
    return last.length + len(renderer().encode(rest if ended else "<|im_end|>" + rest))
