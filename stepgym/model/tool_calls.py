"""Tool calls: what a turn's text holds, and how the formats that models write them in are read.

What looks like a tool call and does not parse is reported as such; it is never taken for a final answer.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The parts of a turn's text.

    Attributes:
        content: What is left outside reasoning and tool calls.
        reasoning: Text between the model's reasoning tags at the start of the turn; None without any.
        tool_calls: In the OpenAI wire format, `arguments` as JSON text.
        invalid: `{text, error}` for each thing that looks like a tool call and is not one.
        closed: Whether the turn's reasoning ends (True without reasoning).
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    invalid: list[dict[str, str]] = field(default_factory=list)
    closed: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as it was read. `id` is what the model called it, where the format has that."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(slots=True)
class Calls:
    """What a format found in a turn: the calls, what looks like one and is none, and the text around them."""

    found: list[Call] = field(default_factory=list)
    invalid: list[dict[str, str]] = field(default_factory=list)
    content: str = ""

    def refuse(self, text: str, error: str) -> None:
        """Report something that looks like a call."""
        self.invalid.append({"text": text.strip()[:2000], "error": error})

    def take(self, text: str, call: Call | str) -> None:
        """Keep a call, or report why it is none."""
        error = call if isinstance(call, str) else not_json([call.name, call.arguments, call.id])
        if error:
            self.refuse(text, error)
        elif isinstance(call, Call):
            self.found.append(call)


class ToolCallFormat(ABC):
    """How a model writes tool calls.

    Attributes:
        delimiters: Texts that set a call apart; where one is a token, only that token counts.
        marked: Whether every call has a delimiter; without any the whole turn has to be looked at.
        short_ids: Whether the template wants ids of nine letters and digits, as Mistral's do.
    """

    delimiters: tuple[str, ...] = ()
    marked: bool = True
    short_ids: bool = False

    @abstractmethod
    def read(self, text: str, shadow: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        """Find the calls in a text.

        Args:
            text: The turn without its reasoning.
            shadow: The same, with delimiters blotted out that are only spelled (see `Delimiters`).
            tools: JSON schemas of the tools on offer.
        """

    def looks_like_call(self, shadow: str) -> bool:
        """Whether a text has a delimiter of a call in it."""
        return any(delimiter in shadow for delimiter in self.delimiters)


def wire_calls(calls: Sequence[Call], id_prefix: str, *, short_ids: bool = False) -> list[dict[str, Any]]:
    """Calls in the OpenAI wire format, with ids `{id_prefix}_{index}` where the model gave none of its own.

    Args:
        calls: As they were read.
        id_prefix: What ids begin with.
        short_ids: Whether an id must have nine letters and digits.
    """
    own = {call.id for call in calls}
    shown = []
    for index, call in enumerate(calls):
        given = call.id if call.id and len(own) == len(calls) else f"{id_prefix}_{index}"
        if short_ids and not (len(given) == 9 and given.isalnum()):
            given = hashlib.sha256(given.encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        shown.append({"id": given, "type": "function", "function": function})
    return shown


def check_wire_calls(calls: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Sort tool calls that an endpoint returned into those whose arguments are a JSON object and the rest."""
    valid: list[dict[str, Any]] = []
    invalid: list[dict[str, str]] = []
    for call in calls:
        function = call.get("function") or {}
        error = arguments_error(function.get("name"), function.get("arguments"))
        if error:
            invalid.append({"text": json.dumps(function, ensure_ascii=False, default=str), "error": error})
        else:
            valid.append(call)
    return valid, invalid


def arguments_error(name: object, arguments: object) -> str:
    """What is wrong with a call's name and arguments (a mapping, or JSON text of one); "" if nothing is."""
    if not isinstance(name, str) or not name:
        return "'name' is missing"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {type(arguments).__name__}"
    return not_json([name, arguments])


def not_json(value: object) -> str:
    """Why a value that Python read as JSON cannot be written as JSON text in UTF-8; "" if it can.

    Python takes `NaN`, numbers too large for a float, and halves of surrogate pairs; nobody could pass them on.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "not JSON: half of a surrogate pair in a string"
    except (ValueError, TypeError, RecursionError) as error:
        return f"not JSON: {error}"
    return ""
