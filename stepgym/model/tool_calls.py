"""Tool calls and reasoning in the text of a turn.

The format is that of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.
What looks like a tool call and does not parse is reported as such; it is never taken for a final answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"(.*?)(" + re.escape(CLOSE) + r"|$)", re.DOTALL)
_REASONING = re.compile(r"\A\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The parts of a turn's text.

    Attributes:
        content: What is left outside reasoning and tool calls.
        reasoning: Text between `<think>` and `</think>` at the start of the turn; None without one.
        tool_calls: In the OpenAI wire format, `arguments` as JSON text.
        invalid: `{text, error}` for each thing that looks like a tool call and is not one.
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    invalid: list[dict[str, str]] = field(default_factory=list)


def parse_turn(text: str, *, tools: bool, reasoning: bool, id_prefix: str = "call") -> ParsedTurn:
    """Take a turn apart.

    Args:
        text: The turn as sampled, without its terminator.
        tools: Whether tools were on offer; without them nothing is a tool call.
        reasoning: Whether `<think>` is the model's own reasoning, to be split off.
        id_prefix: Call ids are `{id_prefix}_{index}`.
    """
    thought = None
    if reasoning and (match := _REASONING.match(text)):
        thought = match.group(1).strip("\n")
        text = text[match.end() :].lstrip("\n")
    if not tools or (OPEN not in text and CLOSE not in text):
        return ParsedTurn(content=text, reasoning=thought)
    calls: list[dict[str, Any]] = []
    invalid: list[dict[str, str]] = []
    for match in _CALL.finditer(text):
        body, closed = match.group(1), bool(match.group(2))
        parsed = _parse_call(body) if closed else f"{OPEN} is never closed"
        if isinstance(parsed, str):
            invalid.append({"text": match.group(0), "error": parsed})
        else:
            name, arguments = parsed
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": f"{id_prefix}_{len(calls)}", "type": "function", "function": function})
    content = _CALL.sub("", text)
    if CLOSE in content:
        invalid.append({"text": content.strip()[:500], "error": f"{CLOSE} without {OPEN}"})
    return ParsedTurn(content=content.strip(), reasoning=thought, tool_calls=calls, invalid=invalid)


def check_wire_calls(calls: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Sort tool calls that an endpoint returned into those whose arguments are a JSON object and the rest."""
    valid: list[dict[str, Any]] = []
    invalid: list[dict[str, str]] = []
    for call in calls:
        function = call.get("function") or {}
        error = _arguments_error(function.get("name"), function.get("arguments"))
        if error:
            invalid.append({"text": json.dumps(function, ensure_ascii=False, default=str), "error": error})
        else:
            valid.append(call)
    return valid, invalid


def _parse_call(body: str) -> tuple[str, dict[str, Any]] | str:
    """Name and arguments, or what is wrong."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(call, dict):
        return "not a JSON object with 'name' and 'arguments'"
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return "'name' is missing"
    if not isinstance(arguments, dict):
        return f"'arguments' must be a JSON object, not {type(arguments).__name__}"
    return name, arguments


def _arguments_error(name: object, arguments: object) -> str:
    if not isinstance(name, str) or not name:
        return "'name' is missing"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {type(arguments).__name__}"
    return ""
