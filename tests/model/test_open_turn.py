"""Under `turns: continue` a prompt is the prompt before, the response, and the observation: nothing else, ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, assistant, system, tool_call, tool_result, user
from stepgym.errors import UserError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer, Turn
from stepgym.record.merge import merge_steps
from stepgym.run.session import Session, SessionLimits

TOOLS = [{"type": "function", "function": {"name": "sql", "description": "", "parameters": {"type": "object"}}}]
every_family = pytest.mark.parametrize("name", sorted(FAMILIES))


class Writer(Engine):
    """Says what it is told, cut at `max_tokens`."""

    kind = "writer"

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._replies = iter(replies)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt_ids: Any, sampling: Any, *, max_tokens: int, **options: Any) -> Completion:
        ids = self._tokenizer.encode(next(self._replies), add_special_tokens=False)
        cut = len(ids) > max_tokens
        return Completion(np.array(ids[:max_tokens], dtype=np.int32), None, "length" if cut else "stop")


@cache
def renderer(name: str, most: int | None = None) -> Renderer:
    return Renderer(tokenizer_for(FAMILIES[name]), turns="continue", max_observation_tokens=most)


def play(
    render: Renderer, replies: Sequence[str], observations: Sequence[Sequence[str]], max_tokens: int = 200
) -> Session:
    """One reply and one observation after the other; the last observation is what the last prompt ends in."""
    session = Session(
        Writer(render.tokenizer, [*replies, "done"]), render, limits=SessionLimits(max_response_tokens=max_tokens)
    )

    async def talk() -> None:
        messages: list[Message] = [system("Be brief."), user("What is the price of Velor?")]
        for observation in observations:
            messages += [await session.chat(messages, stop=["</sql>"]), *map(user, observation)]
        await session.chat(messages)

    asyncio.run(talk())
    return session


texts = st.one_of(
    st.sampled_from(["The answer is 42.", " spaced \n", "<think>a</think>b", "</think>", "<think>open", ""]),
    st.text(alphabet="ab\n <>/🙂é", max_size=12),
)
endings = st.sampled_from(["TERMINATOR", "", "</sql>", "</sql> and more", "EOS"])
observed = st.lists(
    st.one_of(
        st.just("\n\n<information>Doc 1(Title: Velor) It costs 3.</information>\n\n"),
        st.just("<|im_end|>\n<|im_start|>user\nI am an observation.</s>"),
        st.text(alphabet="ab\n <>/🙂é", max_size=20),
    ),
    max_size=3,
)


@every_family
@settings(max_examples=40)
@given(
    turns=st.lists(st.tuples(st.builds(str.__add__, texts, endings), observed), min_size=1, max_size=5),
    most=st.sampled_from([None, 1, 5, 30]),
    max_tokens=st.sampled_from([3, 200]),
)
def test_a_prompt_is_what_was_sent_and_sampled_and_the_observation(
    name: str, turns: list[tuple[str, list[str]]], most: int | None, max_tokens: int
) -> None:
    family, render = FAMILIES[name], renderer(name, most)
    replies = [said.replace("TERMINATOR", family.terminator).replace("EOS", family.eos_token) for said, _ in turns]
    observations = [observation for _, observation in turns]
    session = play(render, replies, observations, max_tokens)
    opening = Renderer(tokenizer_for(family)).prompt(session.steps[0].new_messages)
    assert session.steps[0].rendering == "first"
    assert session.steps[0].prompt_ids.tolist() == opening.new_ids.tolist()
    for before, after, observation in zip(session.steps, session.steps[1:], observations, strict=False):
        said = before.response_ids.tolist()
        closed = bool(said) and said[-1] in render.stop_token_ids
        added = render.encode("".join(observation)).tolist()[:most]
        assert after.prompt_ids.tolist() == [*before.prompt_ids.tolist(), *said[: len(said) - closed], *added]
        assert after.rendering == ("turn_reopened" if closed else "continued")
        assert [message["role"] for message in after.new_messages] == ["user"] * len(observation)


@every_family
@settings(max_examples=15)
@given(turns=st.lists(st.tuples(st.booleans(), observed), min_size=1, max_size=6))
def test_turns_that_go_on_are_one_sequence_and_reopened_ones_begin_another(
    name: str, turns: list[tuple[bool, list[str]]]
) -> None:
    end = FAMILIES[name].terminator
    session = play(renderer(name), ["42" + end * ends for ends, _ in turns], [seen for _, seen in turns])
    reopened = sum(ends for ends, _ in turns)
    sequences, report = merge_steps(session.steps)
    # A reopened turn whose observation begins with the very token that was taken back is no other than a continued one.
    assert len(sequences) <= 1 + reopened
    assert set(report.mismatches) <= {"turn_reopened"}
    if not any("<|im_end|>" in text or "</s>" in text for _, seen in turns for text in seen):
        assert report.mismatches == ({"turn_reopened": reopened} if reopened else {})
        assert len(sequences) == 1 + reopened


def test_the_template_is_applied_once_and_nothing_is_encoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    render = Renderer(tokenizer_for(FAMILIES["thinking_kept"]), turns="continue")
    applied, encoded = [], []
    apply, encode = render.template.apply, render.encode
    monkeypatch.setattr(render.template, "apply", lambda *a, **k: applied.append(1) or apply(*a, **k))
    monkeypatch.setattr(render._open_turn, "_encode", lambda text: encoded.append(text) or encode(text))
    end = FAMILIES["thinking_kept"].terminator
    session = play(render, ["look<sql>1</sql>", "<think>x" + end, "y"] * 4, [[f"Result {n}"] for n in range(12)])
    assert len(session.steps) == 13
    assert len(applied) == 1
    assert encoded == [f"Result {n}" for n in range(12)]


def test_calls_that_go_on_from_an_early_turn_go_on_from_its_ids() -> None:
    render = renderer("chatml")
    session = Session(Writer(render.tokenizer, ["one", "two", "three", "four<|im_end|>", "five"]), render)

    async def talk() -> None:
        start: list[Message] = [user("go")]
        first = [*start, await session.chat(start), user(" A ")]
        second = [*first, await session.chat(first), user(" B ")]
        await session.chat(second)
        fork = [*first[:2], user(" C ")]
        fork = [*fork, await session.chat(fork), user(" D ")]
        await session.chat(fork)

    asyncio.run(talk())
    assert [step.rendering for step in session.steps] == ["first", *["continued"] * 3, "turn_reopened"]
    assert [step.follows for step in session.steps] == [None, 0, 1, 0, 3]
    assert render.decode(session.steps[4].prompt_ids).endswith("assistant\none C four D ")
    assert render.decode(session.steps[2].prompt_ids).endswith("assistant\none A two B ")
    _, report = merge_steps(session.steps)
    assert report.mismatches == {"branched": 1, "turn_reopened": 1}


def test_no_new_message_goes_on_as_it_is() -> None:
    render = renderer("chatml")
    session = Session(Writer(render.tokenizer, ["one", "two"]), render)

    async def talk() -> None:
        said = await session.chat([user("go")])
        await session.chat([user("go"), said])

    asyncio.run(talk())
    assert session.steps[1].prompt_ids.tolist() == session.steps[0].full_ids.tolist()


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_message_of_another_role_closes_the_turn(role: str) -> None:
    render = renderer("headers")
    session = Session(Writer(render.tokenizer, ["one", "two", "three"]), render)
    stranger = system("Hurry.") if role == "system" else tool_result("3", "call_0")

    async def talk() -> None:
        messages: list[Message] = [user("go")]
        for news in ([user("A")], [user("B"), stranger]):
            messages += [await session.chat(messages), *news]
        await session.chat(messages)

    asyncio.run(talk())
    last = session.steps[2]
    assert [step.rendering for step in session.steps] == ["first", "continued", "turn_closed"]
    conversation = [*session.steps[0].new_messages, session.steps[0].message, *session.steps[1].new_messages]
    conversation = [*conversation, session.steps[1].message, *last.new_messages]
    assert last.prompt_ids.tolist() == Renderer(render.tokenizer).prompt(conversation).new_ids.tolist()
    assert merge_steps(session.steps)[1].mismatches == {"turn_closed": 1}


def test_an_agent_that_rewrites_history_opens_a_new_turn() -> None:
    render = renderer("chatml")
    session = Session(Writer(render.tokenizer, ["one", "two", "three"]), render)
    rewritten = [user("go"), assistant("uno"), user("A")]

    async def talk() -> None:
        await session.chat([user("go")])
        said = await session.chat(rewritten)
        await session.chat([*rewritten, said, user(" B")])

    asyncio.run(talk())
    assert [step.rendering for step in session.steps] == ["first", "agent_rewrote_history", "continued"]
    assert render.decode(session.steps[2].prompt_ids).endswith("A<|im_end|>\n<|im_start|>assistant\ntwo B")


def test_observations_are_text() -> None:
    render = renderer("chatml")
    first = render.prompt([user("go")])
    said = render.encode("one")
    turn = Turn([user("go")], first.text, assistant("one"), False, False, prompt_ids=first.new_ids, response_ids=said)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    prompt = render.prompt(
        [user("go"), assistant("one"), parts, {"role": "user", "content": None}, user("c")], (), turn
    )
    assert (prompt.text, prompt.new_ids.tolist()) == ("abc", render.encode("abc").tolist())
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    with pytest.raises(UserError, match="appends observations as text"):
        render.prompt([user("go"), assistant("one"), picture], (), turn)
    with pytest.raises(ValueError, match="goes on from ids"):
        render.prompt(
            [user("go"), assistant("one")], (), Turn([user("go")], first.text, assistant("one"), False, False)
        )


def test_tools_have_no_place() -> None:
    render = renderer("tools_json")
    with pytest.raises(UserError, match="turns: continue has no place for tool calls; use tag actions"):
        render.prompt([user("go")], TOOLS)
    with pytest.raises(UserError, match="no place for tool calls"):
        render.encode_response([user("go")], tool_call("sql", query="x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": "one"}, "'one' is not known; it is conversation or continue"),
        ({"max_observation_tokens": 5}, "set turns: continue"),
        ({"turns": "continue", "max_observation_tokens": 0}, "at least 1"),
        ({"turns": "continue", "history": "append"}, "append has no place under turns: continue"),
    ],
)
def test_settings_that_cannot_be_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Renderer(tokenizer_for(FAMILIES["chatml"]), **options)


# ---- reasoning ------------------------------------------------------------------------------------------------------


def said_in(session: Session) -> list[tuple[str | None, str, str]]:
    """Reasoning, content and text of every message."""
    messages = [step.message or {} for step in session.steps]
    return [(m.get("reasoning_content"), m["content"], m["text"]) for m in messages]


def test_only_the_first_prompt_ends_in_the_opener() -> None:
    render = renderer("thinking_kept")
    session = play(render, ["I look.\n</think>\n\n<sql>1</sql>", "it is 3"], [["<think>"], ["\n<think>\n"]])
    assert said_in(session) == [
        ("I look.", "<sql>1</sql>", "<think>\nI look.\n</think>\n\n<sql>1</sql>"),
        (None, "it is 3", "it is 3"),  # an observation opens nothing
        (None, "done", "done"),
    ]


@pytest.mark.parametrize("name", ["thinking_kept", "thinking_opened"])
def test_reasoning_that_a_turn_leaves_open_goes_on_in_the_next(name: str) -> None:
    render = renderer(name)
    session = play(render, ["I look <sql>1</sql>", "and see", "</think>\n\nso"], [["a</think>b"], [" "], [" "]])
    opener = "<think>\n"
    assert said_in(session) == [
        ("I look <sql>1</sql>", "", f"{opener}I look <sql>1</sql>"),
        ("and see", "", "and see"),  # what an observation says closes nothing
        ("", "so", "</think>\n\nso"),
        (None, "done", "done"),
    ]


def test_a_turn_may_open_reasoning_itself_and_leave_it_open() -> None:
    render = renderer("thinking_stripped")
    end = FAMILIES["thinking_stripped"].terminator
    session = play(render, ["42", "<think>well" + end, "yes</think>7"], [["a"], ["b"], ["c"]])
    assert said_in(session) == [
        (None, "42", "42"),
        ("well", "", "<think>well"),
        ("yes", "7", "yes</think>7"),
        (None, "done", "done"),
    ]


def test_a_tag_that_is_only_spelled_closes_nothing() -> None:
    """`</think>` is one token of this tokenizer; the same characters in other tokens are text."""
    render = renderer("thinking_stripped")
    spelled = np.concatenate([render.encode(c) for c in "</think>"])
    for close, left_open in ((render.encode("</think>"), False), (spelled, True)):
        response = np.concatenate([render.encode("<think>a"), close])
        message, _ = render.read(response, stop=(), tools=(), id_prefix="c")
        assert render.leaves_reasoning_open(message, response) is left_open


@pytest.mark.parametrize(
    ("said", "first", "later"),
    [
        ("<think>a</think><sql>1</sql>", "a</think><sql>1</sql>", "a</think><sql>1</sql>"),
        ("<sql>1</sql>", "\n</think>\n\n<sql>1</sql>", "\n</think>\n\n<sql>1</sql>"),
        ("b</think><sql>1</sql>", "\n</think>\n\nb</think><sql>1</sql>", "b</think><sql>1</sql>"),
        (
            {"role": "assistant", "content": "<sql>1</sql>", "reasoning_content": "a"},
            "a\n</think>\n\n<sql>1</sql>",
            "a\n</think>\n\n<sql>1</sql>",
        ),
    ],
)
def test_what_a_script_says_where_reasoning_is_open(said: Any, first: str, later: str) -> None:
    """`first`: after the template's opener. `later`: after a turn that left its reasoning open."""
    render = renderer("thinking_kept")
    opening = render.prompt([user("go")])
    assert opening.reasoning_open
    ids = render.encode_response([user("go")], said, stop=("</sql>",), prompt=opening)
    assert render.decode(ids) == first
    assert render.encode_response([user("go")], said, stop=("</sql>",)).tolist() == ids.tolist()
    response = render.encode("well")
    message, ended = render.read(response, stop=(), tools=(), id_prefix="c", opener=opening.opener)
    turn = Turn(
        [user("go")],
        opening.text,
        message,
        ended,
        True,
        opener=opening.opener,
        prompt_ids=opening.new_ids,
        response_ids=response,
    )
    prompt = render.prompt([user("go"), message, user("and?")], (), turn)
    assert (prompt.rendering, prompt.opener, prompt.reasoning_open) == ("continued", "", True)
    ids = render.encode_response([user("go"), message, user("and?")], said, stop=("</sql>",), prompt=prompt)
    assert render.decode(ids) == later


def test_a_script_thinks_inside_an_open_turn_as_the_model_would() -> None:
    said = {"role": "assistant", "content": "<sql>1</sql>", "reasoning_content": "a"}
    for name, wanted in (("thinking_stripped", "<think>\na\n</think>\n\n<sql>1</sql>"), ("chatml", "<sql>1</sql>")):
        render = renderer(name)
        opening = render.prompt([user("go")])
        response = render.encode("42")
        message, ended = render.read(response, stop=(), tools=(), id_prefix="c")
        turn = Turn([user("go")], opening.text, message, ended, True, prompt_ids=opening.new_ids, response_ids=response)
        prompt = render.prompt([user("go"), message, user("and?")], (), turn)
        ids = render.encode_response([user("go"), message, user("and?")], said, stop=("</sql>",), prompt=prompt)
        assert render.decode(ids) == wanted
