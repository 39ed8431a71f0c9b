"""Promise 2: "A prompt to sample from ends with the template's generation prompt (or, under `turns: continue`, with an
open assistant turn)."

What is looked at is what the engine was sent, for templates that extend, rewrite, strip, date and show tools; after
turns that ended in a terminator, in a stop string, in the middle (a length limit), and in tool calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, system, tool_result, user
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import CHAT_TEMPLATE, build_tiny_tokenizer
from stepgym.run.session import Session, SessionLimits

OPENER = "<|im_start|>assistant\n"
THINKING_OPENER = "<|im_start|>assistant\n<think>\n"
TURNS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor %}"
)
ASKED = "{%- if add_generation_prompt %}{{- OPENER }}{%- endif %}"


def template(body: str, opener: str = OPENER) -> str:
    return body + ASKED.replace("OPENER", repr(opener))


TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "trims": CHAT_TEMPLATE.replace("{{- message.content or '' }}", "{{- (message.content or '') | trim }}"),
    "dated": template("{{- '<|im_start|>system\\n' + strftime_now('%d %B %Y') + '<|im_end|>\\n' }}" + TURNS),
    "strips thinking": template(TURNS.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]")),
    "opens thinking": template(TURNS, THINKING_OPENER),
}
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
def tokenizer() -> Any:
    texts = ["What is the price of Velor?", "<think>look</think><sql>SELECT 1</sql>", "The answer is 42."] * 3
    return build_tiny_tokenizer(texts, special_tokens=["<sql>", "</sql>"])


@cache
def renderer(name: str) -> Renderer:
    return Renderer(tokenizer(), chat_template=TEMPLATES[name], today=date(2026, 2, 1))


texts = st.one_of(
    st.sampled_from(["The answer is 42.", " spaced \n", "<sql>SELECT 1</sql>", "<think>a</think>b", "</think>", ""]),
    st.text(alphabet="ab\n <>/🙂", max_size=12),
)
endings = st.sampled_from(["<|im_end|>", "", "</sql>", "</sql> and more", "<|endoftext|>"])
replies = st.lists(st.builds(str.__add__, texts, endings), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), replies, st.integers(1, 30))
def test_every_prompt_ends_in_the_generation_prompt(name: str, replies: list[str], max_tokens: int) -> None:
    engine = Writer(tokenizer(), replies)
    session = Session(engine, renderer(name), limits=SessionLimits(max_response_tokens=max_tokens))

    async def play() -> None:
        messages: list[Message] = [system("Be brief."), user("What is the price of Velor?")]
        for number in range(len(replies)):
            message = await session.chat(messages, stop=["</sql>"])
            messages += [message, user(f"Result {number}")]

    asyncio.run(play())
    check(engine, THINKING_OPENER if name == "opens thinking" else OPENER, len(replies))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([CALL, "I look.\n" + CALL + "\n" + CALL, CALL[:-14], "no call"]), min_size=1, max_size=4)
)
def test_also_after_tool_calls(replies: list[str]) -> None:
    engine = Writer(tokenizer(), [reply + "<|im_end|>" for reply in replies])
    session = Session(engine, renderer("plain"))

    async def play() -> None:
        messages: list[Message] = [user("What is the price of Velor?")]
        for _ in replies:
            message = await session.chat(messages, tools=TOOLS)
            calls = message.get("tool_calls") or ()
            messages += [message, *([tool_result("1", call["id"]) for call in calls] or [user("Call a tool.")])]

    asyncio.run(play())
    check(engine, OPENER, len(replies))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_also_when_the_agent_rewrites_what_was_said(name: str) -> None:
    engine = Writer(tokenizer(), ["one<|im_end|>", "two<|im_end|>"])
    session = Session(engine, renderer(name))

    async def play() -> None:
        await session.chat([user("What is the price?")])
        await session.chat([user("What is the price?"), {"role": "assistant", "content": "uno"}, user("And now?")])

    asyncio.run(play())
    check(engine, THINKING_OPENER if name == "opens thinking" else OPENER, 2)


def check(engine: Writer, opener: str, turns: int) -> None:
    """Every prompt ends in the opener, as text and as the ids that the tokenizer has for it."""
    assert len(engine.prompts) == turns
    ids = tokenizer().encode(opener, add_special_tokens=False)
    for prompt in engine.prompts:
        assert tokenizer().decode(prompt).endswith(opener)
        assert prompt[-len(ids) :] == ids
