from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.actions import TagAction, last_answer, parse_action, parse_call, search_tool

from stepgym.errors import ActionError

TAGS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
SOUP = st.lists(st.sampled_from([*TAGS, "Velor", " ", "\n", "é"]), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>a</think><search>who was Velor</search>", TagAction("search", "who was Velor")),
        ("<think>a</think>\n<answer>\n Narn \n</answer>", TagAction("answer", "Narn")),
        ("<search>a</search><answer>b</answer>", TagAction("search", "a")),
        ("<answer>b</answer><search>a</search>", TagAction("answer", "b")),
        ("<search>a</search> overshoot <search>b</search>", TagAction("search", "a")),
        ("<think>I could use <search> here</think><search>a</search>", TagAction("search", "a")),
        ("<search>a <answer>b</answer>", TagAction("answer", "b")),
        ("<search> </search>", TagAction("search", "")),
        ("<answer></answer>", TagAction("answer", "")),
        ("<answer>多い\n行</answer>", TagAction("answer", "多い\n行")),
        ("<search>a", None),
        ("a</search>", None),
        ("<search>a</answer>", None),
        ("<Search>a</Search>", None),
        ("", None),
        ("just words", None),
    ],
)
def test_the_action_is_the_first_that_is_closed(text: str, action: TagAction | None) -> None:
    assert parse_action(text) == action


@given(text=st.one_of(st.text(), SOUP), after=st.one_of(st.text(), SOUP))
def test_what_stands_after_the_stop_string_never_matters(text: str, after: str) -> None:
    action = parse_action(text)
    if "</search>" in text or "</answer>" in text:
        assert parse_action(text + after) == action
    else:
        assert action is None
    if action is not None:
        assert f"<{action.name}>" not in action.text
        assert "</search>" not in action.text
        assert "</answer>" not in action.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>a</answer> or rather <answer> b </answer>.", "b"),
        ("<answer>a <answer>b</answer>", "b"),
        ("<answer>a</answer> <answer>b", "a"),
        ("</answer><answer>", None),
        ("none", None),
        ("<answer></answer>", ""),
        ("<think>maybe <answer>a</answer></think> so it is <answer>b</answer>", "b"),
        ("<answer>a</answer><think>or <answer>b</answer></think> it is c", None),
        ("<think>it may be <answer>a</answer>, or", None),
        ("<answer>a</answer><think>or <answer>b</answer>", "a"),
    ],
)
def test_the_last_answer_of_a_text(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


@given(before=st.one_of(st.text(), SOUP), answer=st.text(alphabet="ab é多"))
def test_an_answer_at_the_end_is_the_last(before: str, answer: str) -> None:
    assert last_answer(f"{before}</think><answer>{answer}</answer>") == answer.strip()


def call(name: object, arguments: object) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"query": " Velor "}, json.dumps({"query": "Velor"})])
def test_the_query_of_a_call(arguments: object) -> None:
    assert parse_call(call("search", arguments)) == "Velor"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (call("answer", {"query": "a"}), "no tool 'answer'; there is search"),
        (call(["search"], {"query": "a"}), "no tool"),
        (call("search", "Velor"), "not JSON"),
        (call("search", "[" * 100_000), "not JSON"),
        (call("search", "[1]"), "one argument, 'query'"),
        (call("search", {}), "one argument, 'query'"),
        (call("search", {"query": 1}), "which is text"),
        (call("search", {"query": "a", "k": 2}), "one argument"),
        ({"id": "call_1"}, "a tool call has a 'function'"),
        ("search", "a tool call has a 'function'"),
    ],
)
def test_what_is_no_call_is_malformed(bad: object, message: str) -> None:
    with pytest.raises(ActionError, match=message) as raised:
        parse_call(bad)
    assert raised.value.status == "malformed"


def test_the_tool_has_a_schema() -> None:
    import jsonschema

    parameters = search_tool()["function"]["parameters"]
    jsonschema.validate({"query": "Velor"}, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"query": 1}, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"query": "Velor", "k": 1}, parameters)
