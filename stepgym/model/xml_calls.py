"""Tool calls written as tags, as Qwen3-Coder does: the parameters are tags, their values bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgym.model.tool_calls import Call, Calls, ToolCallFormat

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, slots=True)
class XmlCalls(ToolCallFormat):
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`.

    A value is text; what the tool's JSON schema wants as something else is read as JSON. A value that cannot be read
    so stays text: the tool then says what it expected.

    Attributes:
        open, close: What stands around a call; "" where nothing does.
        short_ids: See `ToolCallFormat`.
    """

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    short_ids: bool = False

    @property
    def delimiters(self) -> tuple[str, ...]:  # type: ignore[override]
        """Texts that set a call apart."""
        return (*(text for text in (self.open, self.close) if text), "<function=", "</function>")

    def read(self, text: str, shadow: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        """See `ToolCallFormat.read`."""
        if not self.looks_like_call(shadow):
            return Calls(content=text)
        calls, outside, at = Calls(), [], 0
        begin, end = re.escape(self.open or "<function="), re.escape(self.close or "</function>")
        for match in re.finditer(f"{begin}.*?({end}|$)", shadow, re.DOTALL):
            outside.append((at, match.start()))
            at = match.end()
            whole = text[match.start() : match.end()]
            if match.group(1):
                calls.take(whole, _call(whole[len(self.open) : len(whole) - len(self.close)], tools))
            else:
                calls.refuse(whole, f"{self.open or '<function='} is never closed")
        outside.append((at, len(text)))
        calls.content = "".join(text[a:b] for a, b in outside).strip()
        if any(self.looks_like_call(shadow[a:b]) for a, b in outside):
            calls.refuse(calls.content, f"a part of a tool call outside of {self.open}{self.close}".strip())
        return calls


def _call(body: str, tools: Sequence[Mapping[str, Any]]) -> Call | str:
    """The call in a body, or what is wrong with it."""
    function = _FUNCTION.match(body)
    if function is None:
        return "not <function=NAME>...</function>"
    name, inner = function.group(1).strip(), function.group(2)
    schemas, arguments, at = _parameters(name, tools), {}, 0
    while match := _PARAMETER.match(inner, at):
        key, value = match.group(1).strip(), match.group(2)
        if key in arguments:
            return f"parameter {key!r} is given twice"
        if "<parameter=" in value:
            return f"parameter {key!r} is never closed"
        arguments[key] = _typed(value.removeprefix("\n").removesuffix("\n"), schemas.get(key))
        at = match.end()
    if inner[at:].strip():
        return f"not <parameter=NAME>...</parameter>: {inner[at:].strip()[:80]!r}"
    return Call(name, arguments) if name else "the function's name is missing"


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function") or tool
        if function.get("name") == name:
            properties: Mapping[str, Any] = (function.get("parameters") or {}).get("properties") or {}
            return properties
    return {}


def _typed(value: str, schema: Any) -> Any:
    types = _types(schema)
    if not types or ("string" in types and value not in ("null", "None")):
        return value
    if value.strip().lower() in _WORDS:
        read: Any = _WORDS[value.strip().lower()]
    else:
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value if read is None and "null" not in types else read


def _types(schema: Any) -> set[str]:
    """Names of the JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given or ())
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            types |= _types(option)
    if "enum" in schema and not types:
        types = {"string" if isinstance(value, str) else "number" for value in schema["enum"]}
    return types
