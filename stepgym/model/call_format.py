"""Which format a model writes tool calls in: read off what its template writes for a call, not off a name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepgym.errors import UserError
from stepgym.model.json_calls import JsonCalls, NamedJsonCalls
from stepgym.model.template import Template
from stepgym.model.tool_calls import ToolCallFormat
from stepgym.model.xml_calls import XmlCalls

_NAME, _KEY, _VALUE, _ANSWER = "stepgym_probe_tool", "stepgym_key", "stepgym-value-2e5c", "stepgym-answer-61d0"
_USER = {"role": "user", "content": "x"}
_IDS = ("call_0_0", "a1b2c3d4e", f"functions.{_NAME}:0")
"""Ids to try: ours, what Mistral's templates ask for, and what Kimi's have instead of a name."""
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "What."}}},
    },
}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a template does with tools.

    Attributes:
        shown: Whether the prompt has the tools on offer in it.
        format: How a call is written; None where that was not recognised, or nothing is written.
        turn: What a turn with a call looks like; "" where the template writes none.
        arguments_as_text: Whether it wants a call's arguments as JSON text.
        named_ids: Whether it writes a call's id for the tool's name, as Kimi's does (`functions.look_up:0`).
    """

    shown: bool = False
    format: ToolCallFormat | None = None
    turn: str = ""
    arguments_as_text: bool = False
    named_ids: bool = False

    def with_ids(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message whose calls have ids that the template can write."""
        calls = message.get("tool_calls")
        if not calls or not self.named_ids:
            return message
        named = [{**call, "id": f"functions.{call['function']['name']}:{i}"} for i, call in enumerate(calls)]
        return {**message, "tool_calls": named}


def find_tool_support(template: Template) -> ToolSupport:
    """What the template does with tools, by showing it a tool and a call."""
    try:
        shown = _NAME in template.apply([_USER], [_TOOL], to_sample=True)
    except UserError:
        return ToolSupport()
    before, unknown = template.arguments_as_text, ToolSupport(shown)
    try:
        for as_text in (False, True):
            template.arguments_as_text = as_text
            for call_id in _IDS:
                try:
                    turn, answer = _turns(template, call_id)
                except UserError:
                    continue
                found = _recognise(turn, answer, call_id)
                if found is not None:
                    return ToolSupport(shown, found, turn, as_text)
                if _NAME in turn and not unknown.turn:
                    unknown = ToolSupport(shown, None, turn, as_text, call_id == _IDS[2])
    finally:
        template.arguments_as_text = before
    return unknown


def _turns(template: Template, call_id: str) -> tuple[str, str]:
    """What the template writes for a turn with a call, and for one that answers."""
    function = {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})}
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    answers = {"role": "assistant", "content": _ANSWER}
    head = template.apply([_USER], [_TOOL], to_sample=False)
    texts = [template.apply([_USER, message], [_TOOL], to_sample=False) for message in (calls, answers)]
    same = _common(head, texts[0])
    return texts[0][same:], texts[1][same:] if texts[1].startswith(head[:same]) else texts[1]


def _recognise(turn: str, answer: str, call_id: str) -> ToolCallFormat | None:
    short_ids = call_id == _IDS[1]
    if _NAME not in turn:
        return None
    if re.search(rf"<function={_NAME}>\s*<parameter={_KEY}>\s*{_VALUE}\s*</parameter>\s*</function>", turn):
        around = re.search(rf"(<\w+>)\s*<function={_NAME}>.*</function>\s*(</\w+>)", turn, re.DOTALL)
        return XmlCalls(around[1], around[2], short_ids) if around else XmlCalls("", "", short_ids)
    if re.search(rf"\[TOOL_CALLS\]\s*{_NAME}(\[CALL_ID\]\w+)?\[ARGS\]\s*\{{", turn):
        return NamedJsonCalls(short_ids)
    found = _json_with_call(turn)
    if found is None:
        return None
    begin, end, value = found
    listed = isinstance(value, list)
    call: Any = value[0] if listed else value
    ids = [key for key, item in call.items() if item == call_id]
    nested = isinstance(call.get("function"), Mapping)
    call = call["function"] if nested else call
    names = [key for key, item in call.items() if item == _NAME]
    arguments = [key for key, item in call.items() if item == {_KEY: _VALUE}]
    if not names or not arguments:
        return None
    # What stands before an answer as well is the frame of the turn; what stands after it ends the turn.
    answer_at = answer.find(_ANSWER)
    if answer_at < 0:
        return None
    opening = turn[_common(turn[:begin], answer[:answer_at]) : begin].strip()
    ending, closing = answer[answer_at + len(_ANSWER) :].strip(), turn[end:].strip()
    if ending and ending in closing:
        closing = closing[: closing.index(ending)].strip()
    elif not opening:
        closing = ""  # a turn that calls ends in a token of its own, such as <|eom_id|>
    if _NAME in opening + closing or any(character.isspace() for character in opening + closing):
        return None  # more than delimiters
    return JsonCalls(
        open=opening,
        close=closing,
        arguments_key=arguments[0],
        name_key=names[0],
        nested=nested,
        listed=listed,
        id_key=ids[0] if ids else None,
        short_ids=short_ids,
    )


def _json_with_call(turn: str) -> tuple[int, int, Any] | None:
    """Begin, end and value of the JSON in a turn that has the call in it: an object, or a list of one."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"[\[{]", turn):
        try:
            value, end = decoder.raw_decode(turn, match.start())
        except ValueError:
            continue
        call = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(call, dict) and _NAME in turn[match.start() : end] and _VALUE in turn[match.start() : end]:
            return match.start(), end, value
    return None


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
