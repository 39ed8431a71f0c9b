"""Actions of the kinds that models send when they go wrong. An environment answers each and raises for none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TEXTS = (
    "",
    " \n\t ",
    "hello",
    "naïve 数 … 🙂",
    "\x00\x01\x02\x1b[31m",
    "\ud800 lone surrogate \udfff",
    "\u202e\u200b\ufeff",
    "a" * 1_000_000,
    "<" * 10_000,
    "((((" * 5_000,
    "{" * 5_000,
    "'; DROP TABLE students; --",
    '"); import os; os._exit(1)  #',
    "../../../../etc/passwd",
    "%s%s%s%n {0} {} ${HOME} $(id)",
    '<tool_call>{"name": "x", "arguments": </tool_call>',
    "<think>",
    "</think></think>",
    "None",
    "NaN",
    "-1e999",
)
_DEEP = "[" * 5_000 + "]" * 5_000
_NOT_MESSAGES: tuple[object, ...] = (None, 0, 1.5, True, b"bytes", [], ["text"], (), object(), {1: 2})
_BAD_MESSAGES: tuple[dict[Any, Any], ...] = (
    {},
    {"role": "user", "content": "hello"},
    {"role": "assistant"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": 5},
    {"role": "assistant", "content": ["text", {"type": "image_url"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "parts"}]},
    {"role": "assistant", "content": "x", "text": 5},
    {"role": "assistant", "content": "x", "reasoning_content": "y" * 100_000},
    {"role": "assistant", "content": "", "tool_calls": None},
    {"role": "assistant", "content": "", "tool_calls": 5},
    {"role": "assistant", "content": "", "tool_calls": "guess"},
    {"role": "assistant", "content": "", "tool_calls": {}},
    {"role": "assistant", "content": "", "tool_calls": [None, 5, "x", [], {}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": 5, "function": None}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": None, "arguments": "{}"}}]},
    {"role": "assistant", "content": "", "invalid_tool_calls": [{"text": "<tool_call>{", "error": "not JSON"}]},
    {"role": "assistant", "content": "", "invalid_tool_calls": 5},
    {"role": "assistant", "content": "", "invalid_tool_calls": [None, "x"]},
)
_BAD_ARGUMENTS: tuple[object, ...] = (
    None,
    "",
    "{",
    "null",
    "[]",
    '"text"',
    "5",
    "{'single': 'quotes'}",
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"\\ud800": "\\udfff"}',
    "\ud800",
    _DEEP,
    f'{{"a": {_DEEP}}}',
    '{"a": ' + "9" * 5_000 + "}",
    5,
    [],
    {"surprise": object()},
    {1: 2},
)
_BAD_VALUES: tuple[object, ...] = ("text", 5, -1.5, True, None, [], {}, [[]], "\ud800", 10**40)


def garbage(tools: Sequence[Mapping[str, Any]], stop: Sequence[str]) -> Iterator[object]:
    """Every kind of garbage, that for the given tools and stop strings included.

    Args:
        tools: The tools on offer, in the OpenAI format.
        stop: Strings that end a turn; for `</sql>` there will be empty, unclosed and nested `<sql>` tags.
    """
    yield from _NOT_MESSAGES
    yield from _BAD_MESSAGES
    yield from TEXTS
    for end in stop:
        start = end.replace("</", "<", 1)
        yield from (end, start, f"{end}{start}", f"{start}{end}", f"{start}{start}x{end}{end}")
        yield from (f"{start}{text[:100_000]}{end}" for text in TEXTS)
    names = [str(tool["function"]["name"]) for tool in tools]
    yield _call(("no_such_tool", "{}"))
    yield _call(("", "{}"))
    yield _call(("x" * 100_000, "{}"))
    for tool, name in zip(tools, names, strict=True):
        schema = tool["function"].get("parameters") or {}
        for arguments in _BAD_ARGUMENTS:
            yield _call((name, arguments))
        for value in _BAD_VALUES:
            yield _call((name, dict.fromkeys(schema.get("properties", {}), value) | {"surprise": value}))
            yield _call((name, dict.fromkeys(schema.get("properties", {}), value)))
        for text in TEXTS:
            yield _call((name, json.dumps(example(schema, text[:100_000]))))
    yield _call(*((name, "{}") for name in [*names, "no_such_tool"]))
    yield _call(*((name, "{}") for name in names * 50))


def example(schema: Mapping[str, Any], text: str) -> Any:
    """A value that fits a JSON schema as far as its types go, with `text` wherever text may stand."""
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if choices:
            return example(choices[0], text)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][len(text) % len(schema["enum"])]
    kind = schema.get("type")
    if kind == "object":
        return {name: example(field, text) for name, field in schema.get("properties", {}).items()}
    if kind == "array":
        if "prefixItems" in schema:
            return [example(item, text) for item in schema["prefixItems"]]
        return [example(schema.get("items", {}), text)] * (len(text) % 3)
    number = (0, -1, 1, 10**18, -(10**30))[len(text) % 5]
    return {"integer": number, "number": number * 1.5, "boolean": len(text) % 2 == 0, "null": None}.get(str(kind), text)


def _call(*calls: tuple[str, object]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }
