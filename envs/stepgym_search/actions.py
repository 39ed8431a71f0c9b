"""Finding the action in a turn: a search or an answer, in tags or as a tool call.

Only what the assistant wrote is looked at. Tags inside retrieved documents (which may hold anything) and inside the
prompt count for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stepgym.env.messages import Message
from stepgym.errors import ActionError

Actions: TypeAlias = Literal["tags", "tools"]
ActionName: TypeAlias = Literal["search", "answer"]

STOP = ("</search>", "</answer>")

_CLOSING = re.compile(r"</(search|answer)>")


@dataclass(frozen=True, slots=True)
class TagAction:
    """One action: `search` looks for a text, `answer` finishes with it."""

    name: ActionName
    text: str


def parse_action(text: str) -> TagAction | None:
    """The action that a turn ends in, or None.

    Generation stops at the first closing tag, and what overshoots it is not looked at. What is searched or answered
    stands between that tag and the opening tag nearest before it, so that a tag named in the reasoning does no harm.
    """
    closing = _CLOSING.search(text)
    if closing is None:
        return None
    name: ActionName = "search" if closing.group(1) == "search" else "answer"
    opening = text.rfind(f"<{name}>", 0, closing.start())
    if opening < 0:
        return None
    return TagAction(name, text[opening + len(name) + 2 : closing.start()].strip())


def last_answer(text: str) -> str | None:
    """What stands in the last `<answer>…</answer>` of a text, or None.

    Reasoning is left out: all up to `</think>`, and from a `<think>` that is not closed (a turn cut off, say).
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    end = text.rfind("</answer>")
    opening = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if opening < 0 else text[opening + len("<answer>") : end].strip()


def written_text(message: Message) -> str:
    """What the assistant wrote in a turn; reasoning that an endpoint took out of the text is not part of it."""
    return str(message.get("text") or message.get("content") or "")


def parse_call(call: object) -> str:
    """The query of a tool call in the OpenAI format.

    Raises `ActionError` with the status `malformed` for anything but `search(query)`.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ActionError("Error: a tool call has a 'function' with 'name' and 'arguments'.", status="malformed")
    name, arguments = function.get("name"), function.get("arguments")
    if name != "search":
        raise ActionError(f"Error: there is no tool {str(name)[:80]!r}; there is search.", status="malformed")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ActionError("Error: the arguments of search are not JSON.", status="malformed") from None
    if not isinstance(arguments, Mapping) or set(arguments) != {"query"} or not isinstance(arguments["query"], str):
        raise ActionError("Error: search takes one argument, 'query', which is text.", status="malformed")
    return arguments["query"].strip()


def search_tool() -> dict[str, Any]:
    """The tool `search` as a JSON schema in the OpenAI format."""
    query = {"type": "string", "description": "What to look for, in plain words."}
    return {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents and see those that fit best.",
            "parameters": {
                "type": "object",
                "properties": {"query": query},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
