"""The library's renderers: taken where they write what the template writes, and then they extend and judge nothing.

A tokenizer with Qwen3's special tokens and a template that behaves as Qwen3's stand for the real ones, which tests
cannot download.
"""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, tokenizer_for

from stepgym.env.messages import Message, system, tool_result, user
from stepgym.errors import UserError
from stepgym.model.family import Family, known_families
from stepgym.model.renderer import Renderer, Turn

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Try.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "guess", "arguments": {"n":4}}\n</tool_call>'


def qwen_template() -> str:
    """The template of `thinking_stripped`, with the words that the library has around the tools."""
    from renderers import qwen3

    source = FAMILIES["thinking_stripped"].source
    for ours, theirs in (
        ("'Functions that you may call:\\n<tools>'", qwen3._TOOLS_HEADER),
        (
            "'\\n</tools>\\nA call is a JSON object in these tags:\\n<tool_call>\\n"
            '{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n\'',
            qwen3._TOOLS_FOOTER + "<|im_end|>\n",
        ),
    ):
        assert ours in source
        source = source.replace(ours, "'" + theirs.replace("\n", "\\n") + "'")
    return source


@cache
def qwen(name: str = "Qwen/Qwen3-0.6B", template: str | None = None) -> Any:
    tokenizer = copy.deepcopy(tokenizer_for(FAMILIES["thinking_stripped"]))
    tokenizer.name_or_path = name
    tokenizer.chat_template = template or qwen_template()
    tokenizer.add_tokens(["<|endoftext|>"], special_tokens=True)
    return tokenizer


@cache
def glm() -> Any:
    """A tokenizer with the tokens of GLM, for which the library writes and reads."""
    tokenizer = copy.deepcopy(tokenizer_for(FAMILIES["tools_json"]))
    tokens = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
    tokens += ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "/nothink"]
    tokens += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|image|>", "<|video|>"]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = None
    return tokenizer


def turn_after(renderer: Renderer, messages: list[Message], said: str, tools: Any, before: list[int]) -> Any:
    """Sample `said` for the prompt of `messages`; returns the ids so far, the message and the turn."""
    prompt = renderer.prompt(messages, tools)
    ids = np.array(before or prompt.new_ids.tolist(), dtype=np.int32)
    response = renderer.encode(said)
    message, ended = renderer.read(response, stop=(), tools=tools, id_prefix="c", opener=prompt.opener)
    turn = Turn(
        messages, prompt.text, message, ended, truncated=False, tools=tools, prompt_ids=ids, response_ids=response
    )
    return [*ids.tolist(), *response.tolist()], message, turn


def test_the_family_of_a_known_model_is_taken_where_it_writes_what_the_template_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="stepgym.model.family"):
        renderer = Renderer(qwen())
    assert renderer.kind == "qwen3"
    assert "the library's qwen3, for Qwen/Qwen3-0.6B" in caplog.text
    plain = Renderer(qwen(), kind="template")
    assert plain.kind == "template"
    assert renderer.template.digest == plain.template.digest
    assert (renderer.terminator_id, renderer.reasoning) == (plain.terminator_id, plain.reasoning)
    assert set(plain.stop_token_ids) <= set(renderer.stop_token_ids)


def test_ids_are_the_templates_through_a_conversation_with_tools() -> None:
    family, plain = Renderer(qwen()), Renderer(qwen(), kind="template")
    messages: list[Message] = [system("Be brief."), user("Guess.")]
    ids: list[int] = []
    previous: dict[str, Turn] = {}
    for said in ("<think>\nhm\n</think>\n\n" + CALL + "<|im_end|>", "low" + CALL + "<|im_end|>", "It is 4.<|im_end|>"):
        prompts = {r.kind: r.prompt(messages, TOOLS, previous.get(r.kind)) for r in (family, plain)}
        assert prompts["qwen3"].rendering == prompts["template"].rendering == ("extended" if ids else "first")
        assert prompts["qwen3"].new_ids.tolist() == prompts["template"].new_ids.tolist()
        ids = [*ids, *prompts["qwen3"].new_ids.tolist()]
        response = family.encode(said)
        for r in (family, plain):
            message, ended = r.read(response, stop=(), tools=TOOLS, id_prefix=f"c{len(messages)}")
            previous[r.kind] = Turn(
                list(messages),
                prompts[r.kind].text,
                message,
                ended,
                truncated=False,
                tools=TOOLS,
                prompt_ids=np.array(ids, dtype=np.int32),
                response_ids=response,
            )
        ids += response.tolist()
        messages = [*messages, message, *[tool_result("low", c["id"]) for c in message.get("tool_calls") or ()]]
    assert family.prompt([*messages, user("And?")], TOOLS, previous["qwen3"]).rendering == "thinking_stripped"


def test_bridging_adds_what_the_template_adds_after_calls_and_nothing_where_thinking_goes() -> None:
    renderer, library = Renderer(qwen()), Family("qwen3", qwen())
    messages = [user("Guess.")]
    ids, message, turn = turn_after(renderer, messages, "<think>\nhm\n</think>\n\n" + CALL + "<|im_end|>", TOOLS, [])
    result = tool_result("low", message["tool_calls"][0]["id"])
    bridged = library.extend(turn.prompt_ids, turn.response_ids, [result], TOOLS)
    assert bridged is not None
    assert bridged.tolist() == renderer.prompt([*messages, message, result], TOOLS, turn).new_ids.tolist()
    assert library.extend(turn.prompt_ids, turn.response_ids, [user("And?")], TOOLS) is None
    keeping = Family("qwen3", qwen(), keep_thinking=True)
    kept = keeping.extend(turn.prompt_ids, turn.response_ids, [user("And?")], TOOLS)
    assert kept is not None
    assert renderer.decode(kept) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]


@pytest.mark.parametrize("kind", ["auto", "template"])
def test_append_keeps_thinking_in_both_ways_of_rendering(kind: str) -> None:
    renderer = Renderer(qwen(), kind=kind, history="append")
    messages = [user("Guess.")]
    _, message, turn = turn_after(renderer, messages, "<think>\nhm\n</think>\n\n4<|im_end|>", (), [])
    prompt = renderer.prompt([*messages, message, user("And?")], (), turn)
    assert (prompt.rendering, prompt.extends) == ("appended", True)
    assert renderer.decode(prompt.new_ids) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_a_response_without_its_terminator_gets_it_in_what_is_added() -> None:
    renderer = Renderer(qwen(), history="append")
    messages = [user("Guess.")]
    _, message, turn = turn_after(renderer, messages, "<think>\nhm\n</think>\n\n4", (), [])
    prompt = renderer.prompt([*messages, message, user("And?")], (), turn)
    assert prompt.rendering == "appended"
    assert prompt.new_ids[0] == renderer.terminator_id


def test_template_variables_of_the_family_are_taken_and_others_mean_the_template() -> None:
    quiet = Renderer(qwen(), chat_template_kwargs={"enable_thinking": False})
    assert quiet.prompt([user("x")]).text.endswith("<think>\n\n</think>\n\n")
    assert quiet.generation_prompt([user("x")]).endswith("<think>\n\n</think>\n\n")
    other = Renderer(qwen(), chat_template_kwargs={"tone": "kind"})
    assert other.kind == "template"
    assert other.template.kwargs == {"tone": "kind"}


def test_auto_means_the_template_for_other_models_and_templates(caplog: pytest.LogCaptureFixture) -> None:
    assert Renderer(qwen("me/my-qwen")).kind == "template"
    assert Renderer(qwen(), chat_template=FAMILIES["chatml"].source).kind == "template"
    with caplog.at_level(logging.INFO, logger="stepgym.model.family"):
        renderer = Renderer(qwen("Qwen/Qwen3-4B", FAMILIES["thinking_stripped"].source))
    assert renderer.kind == "template"
    assert "other ids for a conversation of user with tools" in caplog.text


def test_a_family_by_name_rules_over_the_template(caplog: pytest.LogCaptureFixture) -> None:
    assert Renderer(qwen("me/my-qwen"), kind="qwen3").kind == "qwen3"
    with caplog.at_level(logging.WARNING, logger="stepgym.model.family"):
        renderer = Renderer(qwen("me/my-qwen", FAMILIES["chatml"].source), kind="qwen3")
    assert "differs from the chat template" in caplog.text
    assert "<tools>" in renderer.prompt([user("x")], TOOLS).text
    bare = copy.deepcopy(qwen("me/my-qwen"))
    bare.chat_template = None
    alone = Renderer(bare, kind="qwen3")
    assert alone.prompt([user("x")], TOOLS).text == renderer.prompt([user("x")], TOOLS).text
    assert alone.template.digest != Renderer(qwen()).template.digest
    message, ended = alone.read(alone.encode(CALL + "<|im_end|>"), stop=(), tools=TOOLS, id_prefix="c")
    assert ended
    assert message["tool_calls"][0]["function"] == {"name": "guess", "arguments": '{"n": 4}'}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "qwen33"}, "is not known"),
        ({"kind": "gemma4"}, "not for model"),
        ({"kind": "qwen3", "chat_template": "x"}, "no chat_template"),
        ({"kind": "qwen3", "chat_template_kwargs": {"tone": "kind"}}, "tone"),
        ({"history": "keep"}, "template or append"),
    ],
)
def test_settings_that_cannot_be_are_one_clear_line(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        Renderer(qwen(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        CALL[:-12],
        CALL.replace('"guess"', '""'),
        CALL.replace('{"n":4}', "[4]"),
        CALL.replace('{"n":4}', '"{}"'),
        "<tool_call>oops</tool_call>",
    ],
)
def test_attempts_that_the_library_would_let_pass_are_reported(said: str) -> None:
    """Both when we read (the format is known) and when the library does."""
    renderer, library = Renderer(qwen()), Family("qwen3", qwen())
    message, _ = renderer.read(renderer.encode(said), stop=(), tools=TOOLS, id_prefix="c")
    assert message["invalid_tool_calls"]
    assert "tool_calls" not in message
    if '"{}"' not in said:  # JSON text of an object is an object to the library
        parsed = library.parse(renderer.encode(said), None, TOOLS, id_prefix="c")
        assert parsed.invalid
        assert not parsed.tool_calls


def test_the_library_is_asked_where_only_it_knows_the_format() -> None:
    """GLM's calls are tags of its own: the tokenizer gets its tokens, the library writes and reads."""
    renderer = Renderer(glm(), kind="glm-4.5")
    call = {"id": "c0", "type": "function", "function": {"name": "guess", "arguments": '{"n": 4}'}}
    ids = renderer.encode_response(
        [user("go")], {"role": "assistant", "content": "", "tool_calls": [call]}, tools=TOOLS
    )
    opener = renderer.prompt([user("go")], TOOLS).opener
    message, _ = renderer.read(ids, stop=(), tools=TOOLS, id_prefix="c", opener=opener)
    assert message["tool_calls"][0]["function"] == {"name": "guess", "arguments": '{"n": 4}'}, renderer.decode(ids)
    written = renderer.decode(ids)
    for broken in ("</tool_call>", "guess"), ("<tool_call>", "guess"), ("<tool_call>", "</tool_call>"):
        text = written
        for part in broken:
            text = text.replace(part, "")
        message, _ = renderer.read(renderer.encode(text), stop=(), tools=TOOLS, id_prefix="c", opener=opener)
        assert message["invalid_tool_calls"], text
        assert "tool_calls" not in message
        untold, _ = renderer.read(renderer.encode(text), stop=(), tools=(), id_prefix="c", opener=opener)
        assert "invalid_tool_calls" not in untold
    draft = "<think>" + written.replace("<think></think>", "").replace("<|im_end|>", "") + "</think>42"
    message, _ = renderer.read(renderer.encode(draft), stop=(), tools=TOOLS, id_prefix="c", opener=opener)
    assert (message["content"].strip(), message.get("invalid_tool_calls")) == ("42", None)


@pytest.mark.parametrize("history", ["template", "append"])
@pytest.mark.parametrize("marker", ["<|observation|>", "<|endoftext|>", ""])
def test_a_model_that_stops_at_the_next_message_is_not_shown_its_first_token_twice(history: Any, marker: str) -> None:
    """GLM's template writes nothing at a turn's end; the model samples the token that begins the next message."""
    renderer = Renderer(glm(), kind="glm-4.5", history=history)
    messages = [user("Guess.")]
    prompt = renderer.prompt(messages, TOOLS)
    said = "\n<think>hm</think>\n<tool_call>guess\n<arg_key>n</arg_key>\n<arg_value>4</arg_value>\n</tool_call>"
    response = renderer.encode(said + marker)
    message, ended = renderer.read(response, stop=(), tools=TOOLS, id_prefix="c", opener=prompt.opener)
    assert not ended
    turn = Turn(
        messages, prompt.text, message, ended, truncated=False, tools=TOOLS,
        prompt_ids=prompt.new_ids, response_ids=response,
    )  # fmt: skip
    result = tool_result("low", message["tool_calls"][0]["id"])
    following = renderer.prompt([*messages, message, result], TOOLS, turn)
    assert following.rendering == "extended"
    whole = renderer.decode([*prompt.new_ids, *response, *following.new_ids])
    assert whole.replace("<|endoftext|>", "") == following.text
    assert whole.count("<|observation|>") == 1


def gemma() -> Any:
    """A tokenizer with the tokens of Gemma 4, whose model stops where the result of its call begins."""
    tokenizer = copy.deepcopy(tokenizer_for(FAMILIES["other_terminator"]))
    tokens = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>', "<|image|>", "<|audio|>"]
    tokens += [f"<|{part}>" for part in ("tool", "tool_call", "tool_response", "image", "audio", "video")]
    tokens += [f"<{part}|>" for part in ("tool", "tool_call", "tool_response", "image", "audio", "video")]
    tokenizer.add_tokens([*tokens, "<|video|>"], special_tokens=True)
    tokenizer.chat_template = None
    return tokenizer


def test_a_call_that_an_expert_makes_ends_as_the_model_would_end_it() -> None:
    renderer = Renderer(gemma(), kind="gemma4", history="append")
    messages = [user("Guess.")]
    prompt = renderer.prompt(messages, TOOLS)
    call = {"id": "c_0", "type": "function", "function": {"name": "guess", "arguments": '{"n": 4}'}}
    response = renderer.encode_response(
        messages, {"role": "assistant", "content": "", "tool_calls": [call]}, tools=TOOLS
    )
    assert renderer.decode(response) == "<|tool_call>call:guess{n:4}<tool_call|><|tool_response>"
    message, ended = renderer.read(response, stop=(), tools=TOOLS, id_prefix="c", opener=prompt.opener)
    turn = Turn(
        messages, prompt.text, message, ended, truncated=False, tools=TOOLS,
        prompt_ids=prompt.new_ids, response_ids=response,
    )  # fmt: skip
    result = {**tool_result("low", "c_0"), "name": "guess"}
    following = renderer.prompt([*messages, message, result], TOOLS, turn)
    assert following.extends
    assert renderer.decode([*prompt.new_ids, *response, *following.new_ids]) == following.text


@pytest.mark.parametrize("kind", ["glm-4.5", "glm-5"])
@pytest.mark.parametrize("thought", ["", "hm"])
def test_an_experts_turn_has_its_reasoning_once(kind: str, thought: str) -> None:
    renderer = Renderer(glm(), kind=kind)
    call = {"id": "c_0", "type": "function", "function": {"name": "guess", "arguments": '{"n": 4}'}}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thought:
        message["reasoning_content"] = thought
    ids = renderer.encode_response([user("Guess.")], message, tools=TOOLS)
    opener = renderer.prompt([user("Guess.")], TOOLS).opener
    said = opener + renderer.decode(ids)
    assert (said.count("<think>"), said.count("</think>"), said.count("hm")) == (1, 1, len(thought) // 2)
    read, _ = renderer.read(ids, stop=(), tools=TOOLS, id_prefix="c", opener=opener)
    assert (read.get("reasoning_content") or "").strip() == thought
    assert read["tool_calls"] == [call]
    assert read["content"].strip() == ""


def test_kimi_writes_a_tools_name_in_the_id_of_a_call() -> None:
    tokenizer = copy.deepcopy(tokenizer_for(FAMILIES["tools_json"]))
    tokens = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_argument_begin|>"]
    tokens += [f"<|tool_call{part}_{end}|>" for part in ("", "s_section") for end in ("begin", "end")]
    tokenizer.add_tokens([*tokens, "[BOS]", "[EOS]"], special_tokens=True)
    tokenizer.chat_template = None
    renderer = Renderer(tokenizer, kind="kimi-k2")
    call = {"id": "call_0", "type": "function", "function": {"name": "guess", "arguments": '{"n": 4}'}}
    ids = renderer.encode_response(
        [user("go")], {"role": "assistant", "content": "", "tool_calls": [call]}, tools=TOOLS
    )
    message, ended = renderer.read(ids, stop=(), tools=TOOLS, id_prefix="c")
    assert ended
    assert message["tool_calls"][0] == {**call, "id": "functions.guess:0"}


def test_known_families_are_those_of_the_library() -> None:
    assert {"qwen3", "llama-3", "gpt-oss", "deepseek-v3"} <= set(known_families())
    assert not {"auto", "default", "custom"} & set(known_families())


def test_what_the_library_takes_out_of_open_reasoning_does_not_end_it() -> None:
    """GLM's renderer reads no reasoning where a call's token stands in it, also where no tool is on offer."""
    renderer = Renderer(glm(), kind="glm-4.5", turns="continue")
    messages: list[Message] = [user("go")]
    prompt = first = renderer.prompt(messages)
    for said, left_open in (("<think>a", True), ("<tool_call>", True), ("c", True), ("d</think>", False)):
        response = renderer.encode(said)
        begin = {"opener": prompt.opener, "reasoning_open": prompt.reasoning_open}
        message, ended = renderer.read(response, stop=(), tools=(), id_prefix="c", **begin)
        turn = Turn(list(messages), "", message, ended, True, prompt_ids=first.new_ids, response_ids=response, **begin)
        messages += [message, user(" and?")]
        prompt = renderer.prompt(messages, (), turn)
        assert prompt.reasoning_open is left_open
