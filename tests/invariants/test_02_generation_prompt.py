"""Promise 2: "A prompt to sample from ends with the template's generation prompt (or, under `turns: continue`, with an
open assistant turn)."

What is looked at is what the engine was sent, under every family of chat templates, both ways with history and both
kinds of turns; after turns that ended in a terminator, in a stop string, in the middle (a length limit), and in tool
calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import date
from functools import cache
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, system, tool_result, user
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import History, Renderer, Turns
from stepgym.run.session import Session, SessionLimits

CALL = '<tool_call>\n{"name": "sql", "arguments": {"query": "SELECT 1"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "sql", "description": "", "parameters": {"type": "object"}}}]


class Writer(Engine):
    """Says what it is told, with the terminator or without, cut at `max_tokens`; keeps the prompts it was sent."""

    kind = "writer"

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._replies = list(replies)
        self.prompts: list[list[int]] = []

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt_ids: Any, sampling: Any, *, max_tokens: int, **options: Any) -> Completion:
        self.prompts.append(prompt_ids.tolist())
        ids = self._tokenizer.encode(self._replies[len(self.prompts) - 1], add_special_tokens=False)
        cut = len(ids) > max_tokens
        return Completion(np.array(ids[:max_tokens], dtype=np.int32), None, "length" if cut else "stop")


@cache
def renderer(name: str, history: History = "template", turns: Turns = "conversation") -> Renderer:
    return Renderer(tokenizer_for(FAMILIES[name]), history=history, turns=turns, today=date(2026, 2, 1))


texts = st.one_of(
    st.sampled_from(["The answer is 42.", " spaced \n", "<sql>SELECT 1</sql>", "<think>a</think>b", "</think>", ""]),
    st.text(alphabet="ab\n <>/🙂", max_size=12),
)
endings = st.sampled_from(["TERMINATOR", "", "</sql>", "</sql> and more", "EOS"])
replies = st.lists(st.builds(str.__add__, texts, endings), min_size=1, max_size=4)
histories = st.sampled_from(["template", "append"])


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), histories, replies, st.integers(1, 30))
def test_every_prompt_ends_in_the_generation_prompt(
    name: str, history: History, replies: list[str], max_tokens: int
) -> None:
    family = FAMILIES[name]
    said = [text.replace("TERMINATOR", family.terminator).replace("EOS", family.eos_token) for text in replies]
    engine = Writer(tokenizer_for(family), said)
    session = Session(engine, renderer(name, history), limits=SessionLimits(max_response_tokens=max_tokens))
    conversations: list[list[Message]] = []

    async def play() -> None:
        messages: list[Message] = [system("Be brief."), user("What is the price of Velor?")]
        for number in range(len(replies)):
            conversations.append(list(messages))
            message = await session.chat(messages, stop=["</sql>"])
            messages += [message, user(f"Result {number}")]

    asyncio.run(play())
    check(name, engine, conversations)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(name for name, family in FAMILIES.items() if family.tool_format == "json")),
    histories,
    st.lists(st.sampled_from([CALL, "I look.\n" + CALL + "\n" + CALL, CALL[:-14], "no call"]), min_size=1, max_size=4),
)
def test_also_after_tool_calls(name: str, history: History, replies: list[str]) -> None:
    engine = Writer(tokenizer_for(FAMILIES[name]), [reply + "<|im_end|>" for reply in replies])
    session = Session(engine, renderer(name, history))
    conversations: list[list[Message]] = []

    async def play() -> None:
        messages: list[Message] = [user("What is the price of Velor?")]
        for _ in replies:
            conversations.append(list(messages))
            message = await session.chat(messages, tools=TOOLS)
            calls = message.get("tool_calls") or ()
            messages += [message, *([tool_result("1", call["id"]) for call in calls] or [user("Call a tool.")])]

    asyncio.run(play())
    check(name, engine, conversations, TOOLS)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_also_when_the_agent_rewrites_what_was_said(name: str) -> None:
    end = FAMILIES[name].terminator
    engine = Writer(tokenizer_for(FAMILIES[name]), ["one" + end, "two" + end])
    session = Session(engine, renderer(name))
    first = [user("What is the price?")]
    second = [*first, {"role": "assistant", "content": "uno"}, user("And now?")]

    async def play() -> None:
        await session.chat(first)
        await session.chat(second)

    asyncio.run(play())
    check(name, engine, [first, second])


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), replies, st.integers(1, 30))
def test_under_continue_every_prompt_ends_in_the_assistant_turn_that_the_first_one_opened(
    name: str, replies: list[str], max_tokens: int
) -> None:
    family, render = FAMILIES[name], renderer(name, turns="continue")
    said = [text.replace("TERMINATOR", family.terminator).replace("EOS", family.eos_token) for text in replies]
    engine = Writer(tokenizer_for(family), said)
    session = Session(engine, render, limits=SessionLimits(max_response_tokens=max_tokens))
    messages: list[Message] = [system("Be brief."), user("What is the price of Velor?")]
    first = list(messages)

    async def play() -> None:
        for number in range(len(replies)):
            message = await session.chat(messages, stop=["</sql>"])
            messages.extend([message, user(f"Result {number}")])

    asyncio.run(play())
    opening = engine.prompts[0]
    check(name, Sent(engine.prompts[:1]), [first])
    controls = {*render.tokenizer.all_special_ids, *render.stop_token_ids}
    for number, prompt in enumerate(engine.prompts[1:]):
        # The turn is the first prompt's: of what follows that, nothing is a control token but what was sampled, and no
        # response's end of turn.
        assert prompt[: len(opening)] == opening
        responses = [step.response_ids.tolist() for step in session.steps[: number + 1]]
        left = [said[:-1] if said and said[-1] in render.stop_token_ids else said for said in responses]
        sampled = Counter(token for said in left for token in said if token in controls)
        assert Counter(token for token in prompt[len(opening) :] if token in controls) == sampled
        assert render.decode(prompt).endswith(f"Result {number}")


class Sent:
    """Prompts that were sent."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts


def check(name: str, engine: Writer | Sent, conversations: list[list[Message]], tools: Any = ()) -> None:
    """Every prompt ends in the opener, as text and as the ids that the tokenizer has for it."""
    family, render = FAMILIES[name], renderer(name)
    assert len(engine.prompts) == len(conversations)
    ids = render.encode(family.generation_prompt).tolist()
    for prompt, messages in zip(engine.prompts, conversations, strict=True):
        assert render.generation_prompt(messages, tools) == family.generation_prompt
        assert render.decode(prompt).endswith(family.generation_prompt)
        assert prompt[len(prompt) - len(ids) :] == ids
        # A template with nothing of its own for sampling ends in the last message.
        assert family.generation_prompt or render.decode(prompt).endswith("[/INST]")
