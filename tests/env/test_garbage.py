from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.env.garbage import example, garbage
from stepgym.env.messages import as_assistant
from stepgym.errors import ActionError

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "mode": {"enum": ["a", "b"]},
                "flags": {"type": "array", "items": {"type": "boolean"}},
                "pair": {"type": "array", "prefixItems": [{"type": "number"}, {"const": 5}]},
                "inner": {"type": "object", "properties": {"nothing": {"type": "null"}}},
            },
        },
    },
}


@given(st.text())
def test_examples_fit_their_schema(text: str) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    value = example(schema, text)
    jsonschema.validate(value, schema)
    assert value["query"] == text


def test_there_is_garbage_of_every_kind() -> None:
    actions = list(garbage([TOOL], ("</sql>",)))
    messages, refused = [], 0
    for action in actions:
        try:
            messages.append(as_assistant(action))
        except ActionError:
            refused += 1
    assert refused > 10
    texts = [message["text"] for message in messages]
    assert {"", "<sql>", "</sql>", "</sql><sql>"} <= set(texts)
    assert any("\ud800" in text for text in texts)
    assert max(map(len, texts)) >= 1_000_000
    names = {
        call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    }
    assert {"find", "no_such_tool", ""} <= names
    assert any(message.get("invalid_tool_calls") for message in messages)


@pytest.mark.parametrize("stop", [(), ("END",)])
def test_without_tools_there_is_still_garbage(stop: tuple[str, ...]) -> None:
    assert len(list(garbage([], stop))) > 40
