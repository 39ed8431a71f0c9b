"""Every family of chat templates, played through a session: what the model is sent is what it was sent and said before,
plus what is new, or the record says why not; tool calls and reasoning come back as they were said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import date
from functools import cache
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, Family, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, system, tool_result, user
from stepgym.errors import UserError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import History, Renderer
from stepgym.record.step import Step
from stepgym.run.session import Session, SessionLimits

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Try a number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer"}, "note": {"type": "string"}, "deep": {"type": "object"}},
                "required": ["number"],
            },
        },
    }
]
REASONS = {"template_rewrote_history", "thinking_stripped", "truncated_turn"}
every_family = pytest.mark.parametrize("name", sorted(FAMILIES))
tool_families = pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.tools))
thinking_families = pytest.mark.parametrize(
    "name", sorted(name for name, family in FAMILIES.items() if family.reasoning != "none")
)


class Writer(Engine):
    """Says what it is told, cut at `max_tokens`; keeps the ids that it was sent and that it returned."""

    kind = "writer"

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._replies = list(replies)
        self.log: list[tuple[list[int], list[int]]] = []

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt_ids: Any, sampling: Any, *, max_tokens: int, **options: Any) -> Completion:
        ids = self._tokenizer.encode(self._replies[len(self.log)], add_special_tokens=False)
        self.log.append((prompt_ids.tolist(), ids[:max_tokens]))
        return Completion(
            np.array(ids[:max_tokens], dtype=np.int32), None, "length" if len(ids) > max_tokens else "stop"
        )


@cache
def renderer(name: str, history: History = "template") -> Renderer:
    return Renderer(tokenizer_for(FAMILIES[name]), history=history, today=date(2026, 2, 1))


def call_text(family: Family, number: int, spaces: str = " ") -> str:
    """A call as the family's model would write it; `spaces` after its colons."""
    arguments = json.dumps({"number": number}, separators=(", ", ":" + spaces))
    if family.tool_format == "xml":
        return f"<tool_call>\n<function=guess>\n<parameter=number>\n{number}\n</parameter>\n</function>\n</tool_call>"
    key = "parameters" if family.tool_format == "headers" else "arguments"
    call = f'{{"name": "guess", "{key}":{spaces}{arguments}'
    if family.tool_format == "headers":
        return call + "}"
    if family.tool_format == "mistral":
        return f'[TOOL_CALLS][{call}, "id": "c{number}"}}]'
    return f"<tool_call>\n{call}}}\n</tool_call>"


@st.composite
def replies(draw: st.DrawFn, name: str) -> list[str]:
    family = FAMILIES[name]
    plain = st.one_of(
        st.sampled_from(
            ["The answer is 42.", " spaced \n", "", "<sql>SELECT 1</sql>", "1 < 2", "</think>", "in\n\nwords"]
        ),
        st.text(alphabet='ab\n <>/🙂é{}[]"', max_size=12),
    )
    texts = [plain]
    if family.tools:
        texts.append(st.builds(lambda n, s: call_text(family, n, s), st.integers(0, 99), st.sampled_from(["", " "])))
        if not family.one_call:
            texts.append(st.builds(lambda n, t: t + "\n" + call_text(family, n), st.integers(0, 99), plain))
        texts.append(st.just(call_text(family, 1)[:-4]))
    said = st.one_of(texts)
    if family.reasoning != "none":
        head = "" if family.opened else "<think>\n"
        thought = st.builds(lambda a, b: f"{head}{a.strip()}\n</think>\n\n{b}", plain, said)
        said = st.one_of(said, thought, thought)
    ending = st.sampled_from([family.terminator, family.terminator, family.terminator, "</sql>", ""])
    return draw(st.lists(st.builds(str.__add__, said, ending), min_size=1, max_size=4))


def play(name: str, texts: Sequence[str], *, history: History, max_tokens: int = 200) -> tuple[Session, Writer, Any]:
    """A conversation with one reply after the other, tools on offer where the family shows them."""
    family = FAMILIES[name]
    engine = Writer(tokenizer_for(family), texts)
    session = Session(engine, renderer(name, history), limits=SessionLimits(max_response_tokens=max_tokens))
    tools = TOOLS if family.tools else ()

    async def talk() -> list[list[Message]]:
        messages: list[Message] = [system("Be brief."), user("What is the price of Velor?")]
        seen = []
        for number in range(len(texts)):
            seen.append(list(messages))
            message = await session.chat(messages, tools=tools, stop=["</sql>"])
            calls = message.get("tool_calls") or ()
            messages += [message, *([tool_result("low", c["id"]) for c in calls] or [user(f"Result {number}")])]
        return seen

    return session, engine, asyncio.run(talk())


def check(name: str, session: Session, engine: Writer, seen: list[list[Message]], history: History) -> None:
    family, render = FAMILIES[name], renderer(name)
    tools = TOOLS if family.tools else ()
    for number, (step, messages) in enumerate(zip(session.steps, seen, strict=True)):
        prompt, response = engine.log[number]
        assert step.prompt_ids is not None
        assert step.prompt_ids.tolist() == prompt
        assert step.response_ids is not None
        assert step.response_ids.tolist() == response
        text = render.template.apply(messages, tools, to_sample=True)
        assert render.decode(prompt).endswith(family.generation_prompt)
        assert render.generation_prompt(messages, tools) == family.generation_prompt
        if number == 0:
            assert step.rendering == "first"
        before = [*engine.log[number - 1][0], *engine.log[number - 1][1]] if number else []
        if step.rendering in ("extended", "appended"):
            assert prompt[: len(before)] == before
            new = render.decode(prompt[len(before) :])
            if step.rendering == "extended":
                assert text.endswith(new)
        else:
            assert step.rendering == "first" if number == 0 else step.rendering in REASONS
            assert prompt == render.encode(text).tolist()
            assert number == 0 or history == "template", step.rendering


@every_family
@settings(max_examples=25, deadline=None)
@given(data=st.data(), max_tokens=st.sampled_from([5, 200, 200]))
def test_prompts_extend_what_was_sampled_or_say_why_not(name: str, data: st.DataObject, max_tokens: int) -> None:
    texts = data.draw(replies(name))
    for history in ("template", "append"):
        session, engine, seen = play(name, texts, history=history, max_tokens=max_tokens)
        check(name, session, engine, seen, history)


@every_family
def test_plain_turns_are_extended_unless_the_template_rewrites(name: str) -> None:
    family = FAMILIES[name]
    answer = "done\n</think>\n\n42" if family.opened else "42"
    session, _, _ = play(name, [answer + family.terminator] * 3, history="template")
    stripped = family.opened and family.reasoning == "stripped"
    again = "template_rewrote_history" if family.rewrites else "thinking_stripped" if stripped else "extended"
    assert [step.rendering for step in session.steps] == ["first", again, again]


@pytest.mark.parametrize("name", ["thinking_stripped", "thinking_opened", "last_differs"])
def test_append_keeps_what_the_template_would_rewrite(name: str) -> None:
    family = FAMILIES[name]
    head = "" if family.opened else "<think>\n"
    text = f"{head}look\n</think>\n\n42{family.terminator}"
    session, _, _ = play(name, [text] * 3, history="append")
    assert [step.rendering for step in session.steps] == ["first", "appended", "appended"]
    render = renderer(name)
    last = render.decode(session.steps[-1].prompt_ids.tolist())  # type: ignore[union-attr]
    assert last.count("look") == 2
    # What is added is what the template writes between a turn and the next.
    new = session.steps[1].prompt_ids[session.steps[0].length :].tolist()  # type: ignore[index]
    opened = render.template.apply([user("a"), {"role": "assistant", "content": "b"}, user("Result 0")], to_sample=True)
    assert opened.endswith(render.decode(new))


def test_append_gives_up_where_what_follows_stands_inside_the_turn() -> None:
    """As Gemma 4 writes results of calls: nothing tells then where the sampled turn ends."""
    family = FAMILIES["tools_json"]
    source = (
        "{{- tools | tojson if tools else '' }}{%- for m in messages %}"
        "{%- if m.role == 'tool' %}{{- '\\nresult: ' + m.content }}{%- else %}"
        "{{- ('<|im_end|>\\n' if not loop.first else '') + '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
        "{%- for c in m.tool_calls or [] %}"
        "{{- '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) }}"
        "{{- '</tool_call>' }}"
        "{%- endfor %}{%- endif %}{%- if loop.last %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    for history in ("template", "append"):
        render = Renderer(tokenizer_for(family), chat_template=source, history=history)  # type: ignore[arg-type]
        engine = Writer(tokenizer_for(family), [call_text(family, 7) + "<|im_end|>", "42<|im_end|>"])
        session = Session(engine, render)

        async def talk(session: Session = session) -> None:
            messages = [user("go")]
            message = await session.chat(messages, tools=TOOLS)
            await session.chat([*messages, message, tool_result("low", message["tool_calls"][0]["id"])], tools=TOOLS)

        asyncio.run(talk())
        assert session.steps[1].rendering == "template_rewrote_history"
        assert "result: low" in render.decode(engine.log[1][0])


def test_thinking_stays_between_the_calls_of_one_question_and_goes_with_the_next() -> None:
    family = FAMILIES["thinking_stripped"]
    thought = "<think>\nlook\n</think>\n\n"
    called = thought + call_text(family, 4) + family.terminator
    session, _, _ = play(
        "thinking_stripped", [called, called, thought + "42" + family.terminator, "43"], history="template"
    )
    assert [step.rendering for step in session.steps] == ["first", "extended", "extended", "thinking_stripped"]


@tool_families
@pytest.mark.parametrize("spaces", ["", " "])
def test_tool_calls_are_read_and_extended(name: str, spaces: str) -> None:
    family = FAMILIES[name]
    close = "look\n</think>\n\n" if family.opened else ""
    session, _, _ = play(name, [close + call_text(family, 7, spaces) + family.terminator] * 2, history="template")
    for step in session.steps:
        assert step.message is not None
        (call,) = step.message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"number": 7}
        assert step.message["content"] == ""
        assert step.status == "ok"
    assert session.steps[1].rendering == "extended"


@tool_families
@settings(max_examples=30, deadline=None)
@given(
    arguments=st.fixed_dictionaries(
        {"number": st.integers(-5, 10**6)},
        optional={
            "note": st.text(alphabet="ab c'\"\\é🙂\n<>", max_size=12).map(str.strip),
            "deep": st.dictionaries(
                st.text("xyz", min_size=1, max_size=3), st.none() | st.booleans() | st.floats(0, 1)
            ),
        },
    )
)
def test_a_message_with_a_call_round_trips(name: str, arguments: dict[str, Any]) -> None:
    render = renderer(name)
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "guess", "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = render.encode_response([user("go")], message, tools=TOOLS)
    opener = render.prompt([user("go")], TOOLS).opener
    read, ended = render.read(ids, stop=(), tools=TOOLS, id_prefix="c", opener=opener)
    assert ended
    assert "invalid_tool_calls" not in read, read
    assert read["tool_calls"][0]["function"]["name"] == "guess"
    assert json.loads(read["tool_calls"][0]["function"]["arguments"]) == arguments


@tool_families
def test_what_looks_like_a_call_and_is_none_is_reported(name: str) -> None:
    family, render = FAMILIES[name], renderer(name)
    opener = render.prompt([user("go")], TOOLS).opener
    whole = call_text(family, 7)
    for broken in (whole[:-3], whole.replace("guess", ""), whole.replace("{", "(").replace("<parameter", "<param")):
        text = ("\n</think>\n\n" if opener else "") + broken
        read, _ = render.read(render.encode(text), stop=(), tools=TOOLS, id_prefix="c", opener=opener)
        if family.tool_format == "headers" and '"name"' not in broken.replace("(", ""):
            continue
        if family.tool_format == "headers" and broken.startswith("("):
            assert read["content"] == broken  # no JSON, no token: words
        else:
            assert read.get("invalid_tool_calls"), broken
        assert "tool_calls" not in read
        untold, _ = render.read(render.encode(text), stop=(), tools=(), id_prefix="c", opener=opener)
        assert "invalid_tool_calls" not in untold


@pytest.mark.parametrize("name", ["tools_json", "tools_xml", "thinking_stripped", "inst_tools"])
def test_text_that_merely_spells_a_call_is_no_call(name: str) -> None:
    family, render = FAMILIES[name], renderer(name)
    whole = call_text(family, 7)
    spelled = np.concatenate([render.encode(letter) for letter in whole])
    assert render.decode(spelled) == whole
    if family.tool_format == "xml":  # the tags inside are text in any case: half a call
        read, _ = render.read(spelled, stop=(), tools=TOOLS, id_prefix="c")
        assert read["invalid_tool_calls"]
        assert "tool_calls" not in read
        return
    read, _ = render.read(spelled, stop=(), tools=TOOLS, id_prefix="c")
    assert read["content"] == whole
    assert "tool_calls" not in read
    assert "invalid_tool_calls" not in read
    both = np.concatenate([spelled, render.encode(whole)])
    read, _ = render.read(both, stop=(), tools=TOOLS, id_prefix="c")
    assert len(read["tool_calls"]) == 1
    assert read["content"] == whole


@thinking_families
def test_reasoning_is_split_off_and_round_trips(name: str) -> None:
    family, render = FAMILIES[name], renderer(name)
    opener = render.prompt([user("go")]).opener
    assert opener == ("<think>\n" if family.opened else "")
    message = {"role": "assistant", "content": "It is 42.", "reasoning_content": "Let me see."}
    ids = render.encode_response([user("go")], message)
    read, ended = render.read(ids, stop=(), tools=(), id_prefix="c", opener=opener)
    assert ended
    assert {key: read[key] for key in message} == message
    assert read["text"].startswith("<think>\n")


@thinking_families
def test_reasoning_that_never_ends_leaves_no_content_but_all_the_text(name: str) -> None:
    family, render = FAMILIES[name], renderer(name)
    opener = render.prompt([user("go")]).opener
    said = ("" if family.opened else "<think>\n") + "hm <sql>SELECT 1</sql> and"
    read, ended = render.read(render.encode(said), stop=(), tools=(), id_prefix="c", opener=opener)
    assert not ended
    assert read["content"] == ""
    assert read["text"] == opener + said
    cut, _ = render.read(render.encode(said), stop=("</sql>",), tools=(), id_prefix="c", opener=opener)
    assert cut["text"].endswith("<sql>SELECT 1</sql>")
    assert cut["reasoning_content"] == "hm <sql>SELECT 1</sql>"


@pytest.mark.parametrize("name", ["thinking_stripped", "thinking_kept"])
def test_a_call_inside_reasoning_that_never_ends_is_reported_and_a_draft_is_not(name: str) -> None:
    family, render = FAMILIES[name], renderer(name)
    opener = render.prompt([user("go")], TOOLS).opener
    head = "" if family.opened else "<think>\n"
    call = call_text(family, 7)
    never, _ = render.read(render.encode(head + call), stop=(), tools=TOOLS, id_prefix="c", opener=opener)
    assert never["content"] == ""
    assert "never ends" in never["invalid_tool_calls"][0]["error"]
    draft = f"{head}perhaps {call}\n</think>\n\n42"
    read, _ = render.read(render.encode(draft), stop=(), tools=TOOLS, id_prefix="c", opener=opener)
    assert read["content"] == "42"
    assert "tool_calls" not in read
    assert "invalid_tool_calls" not in read


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.reasoning == "none"))
def test_thinking_tags_stay_content_where_the_template_knows_none(name: str) -> None:
    render = renderer(name)
    read, _ = render.read(render.encode("<think>a</think>b"), stop=(), tools=(), id_prefix="c")
    assert read["content"] == "<think>a</think>b"
    assert "reasoning_content" not in read


@every_family
def test_the_terminator_is_the_families_own_and_the_end_of_text_stops_too(name: str) -> None:
    family, render = FAMILIES[name], renderer(name)
    assert render.terminator == family.terminator
    assert render.stop_token_ids[0] == render.terminator_id
    assert tokenizer_for(family).eos_token_id in render.stop_token_ids


@pytest.mark.parametrize("name", ["chatml", "inst", "other_terminator", "thinking_opened"])
def test_a_template_that_shows_no_tools_refuses_them(name: str) -> None:
    with pytest.raises(UserError, match="does not show tools") as caught:
        renderer(name).prompt([user("x")], TOOLS)
    assert "\n" not in str(caught.value)


def test_a_template_that_writes_calls_in_a_way_that_is_not_known_refuses_tools() -> None:
    family = FAMILIES["tools_json"]
    odd = family.source.replace(
        '<tool_call>\\n{"name": "\' + call.function.name + \'"', "Call ' + call.function.name + '"
    )
    assert odd != family.source
    render = Renderer(tokenizer_for(family), chat_template=odd)
    with pytest.raises(UserError, match="format that is not known") as caught:
        render.prompt([user("x")], TOOLS)
    assert "\n" not in str(caught.value)


def test_two_user_messages_in_a_row_are_one_clear_line_where_they_are_refused() -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        renderer("alternating").prompt([user("a"), user("b")])


def test_other_tools_in_the_next_turn_are_shown_and_named() -> None:
    engine = Writer(tokenizer_for(FAMILIES["tools_json"]), ["one<|im_end|>", "two<|im_end|>"])
    for history in ("template", "append"):
        engine.log.clear()
        session = Session(engine, renderer("tools_json", history))

        async def talk(session: Session = session) -> list[Step]:
            first = [user("go")]
            message = await session.chat(first, tools=TOOLS)
            other = [{"type": "function", "function": {**TOOLS[0]["function"], "name": "ask"}}]  # type: ignore[dict-item]
            await session.chat([*first, message, user("more")], tools=other)
            return session.steps

        steps = asyncio.run(talk())
        assert steps[1].rendering == "tools_changed"
        assert '"ask"' in renderer("tools_json").decode(steps[1].prompt_ids.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("history", ["template", "append"])
def test_an_agent_that_rewrites_its_messages_is_rendered_anew(history: History) -> None:
    engine = Writer(tokenizer_for(FAMILIES["chatml"]), ["one<|im_end|>", "two<|im_end|>"])
    session = Session(engine, renderer("chatml", history))
    second = [user("go"), {"role": "assistant", "content": "uno"}, user("more")]

    async def talk() -> None:
        await session.chat([user("go")])
        await session.chat(second)

    asyncio.run(talk())
    render = renderer("chatml")
    assert session.steps[1].rendering == "agent_rewrote_history"
    assert engine.log[1][0] == render.encode(render.template.apply(second, to_sample=True)).tolist()


def test_an_expert_closes_reasoning_that_the_prompt_opened() -> None:
    for name in ("thinking_opened", "thinking_kept"):
        render = renderer(name)
        opener = render.prompt([user("go")]).opener
        for said in ("<sql>SELECT 1</sql>", {"role": "assistant", "content": "<sql>SELECT 1</sql>"}):
            ids = render.encode_response([user("go")], said, stop=("</sql>",))
            read, _ = render.read(ids, stop=("</sql>",), tools=(), id_prefix="c", opener=opener)
            assert read["content"] == "<sql>SELECT 1</sql>"
        ids = render.encode_response([user("go")], "<think>a</think>b")
        assert render.read(ids, stop=(), tools=(), id_prefix="c", opener=opener)[0]["reasoning_content"] == "a"
