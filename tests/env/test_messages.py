from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.env.messages import as_assistant, as_observation, assistant, call_id, tool_call, tool_result, user
from stepgym.errors import ActionError, EnvError


@given(st.text())
def test_text_is_an_assistant_message(text: str) -> None:
    assert as_assistant(text) == {"role": "assistant", "content": text, "text": text} == assistant(text)


def test_an_assistant_message_keeps_its_fields_and_gets_text() -> None:
    message = {"content": "x", "tool_calls": [], "reasoning_content": "r"}
    assert as_assistant(message) == {**message, "role": "assistant", "text": "x"}
    assert as_assistant({"content": None})["content"] == ""
    assert as_assistant({"content": "a", "text": "<think>b</think>a"})["text"] == "<think>b</think>a"
    assert as_assistant({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})["content"] == "ab"
    assert "role" not in message


@pytest.mark.parametrize(
    "action",
    [
        None,
        5,
        ["x"],
        b"x",
        {"role": "user", "content": "x"},
        {"content": 5},
        {"content": [{"type": "image_url"}]},
        {"content": "", "tool_calls": 5},
        {"content": "", "tool_calls": "guess"},
        {"content": "", "invalid_tool_calls": {}},
    ],
)
def test_anything_else_is_malformed(action: Any) -> None:
    with pytest.raises(ActionError) as caught:
        as_assistant(action)
    assert caught.value.status == "malformed"


def test_observations_are_lists_of_messages() -> None:
    assert as_observation(None) == []
    assert as_observation("hi") == [user("hi")]
    assert as_observation(tool_result("r", "1")) == [{"role": "tool", "content": "r", "tool_call_id": "1"}]
    assert as_observation((user("a"), user("b"))) == [user("a"), user("b")]


@pytest.mark.parametrize("observation", [5, ["text"], {"a", "b"}, [[]], b"x"])
def test_other_observations_are_the_environments_fault(observation: Any) -> None:
    with pytest.raises(EnvError, match="an observation is text, a message or a list of messages"):
        as_observation(observation)


def test_a_tool_call_is_in_the_wire_format() -> None:
    call = tool_call("find", name="naïve", limit=3)["tool_calls"][0]
    assert call["type"] == "function"
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]) == {"name": "naïve", "limit": 3}
    assert call_id(call, 7) == call["id"]
    assert [call_id(bad, 7) for bad in (None, {}, {"id": 5}, {"id": ""})] == ["call_7"] * 4
