"""How a conversation's next prompt goes on from what was sampled.

A template writes text, a model sampled ids. The next prompt extends the ids where the template, shown the whole
conversation, writes the sampled turn where it was sampled and leaves what came before as it was: what it writes after
the turn is then all that is new. Where it does not, the conversation is rendered anew, or, with `history: append`, a
neutral turn stands in for the sampled one, and what the template writes after that is added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgym.env.messages import Message
from stepgym.errors import UserError
from stepgym.model.template import Template
from stepgym.model.turn_reader import TurnReader
from stepgym.record.step import Ids

_STAND_IN = "stepgym-stand-in-5d20"


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One prompt and what was sampled for it: all that the next prompt depends on.

    Attributes:
        messages: The messages that the prompt was rendered from.
        prompt_text: What the template made of them.
        message: The assistant message that came back.
        ended: Whether the response ended in the turn's terminator.
        truncated: Whether it was cut by a length limit.
        tools: Tool schemas that were on offer.
        opener: The end of the prompt that left reasoning open; "" where none was.
        reasoning_open: Whether it was answered inside reasoning (see `Prompt.reasoning_open`).
        appended: Whether the prompt was other than what the template would have written.
        prompt_ids, response_ids: int32 arrays, what was sent and returned; None where they are not kept.
    """

    messages: Sequence[Mapping[str, Any]]
    prompt_text: str
    message: Message
    ended: bool
    truncated: bool
    tools: Sequence[Mapping[str, Any]] = ()
    opener: str = ""
    appended: bool = False
    prompt_ids: Ids | None = None
    response_ids: Ids | None = None
    reasoning_open: bool = False


class Continuation:
    """Tells what a template writes after a sampled turn.

    Args:
        template: The model's template.
        reader: How the model's turns are taken apart.
        terminators: What may end a turn.
    """

    def __init__(self, template: Template, reader: TurnReader, terminators: Sequence[str]) -> None:
        self._template = template
        self._reader = reader
        self._terminators = tuple(terminators)

    def addition(self, text: str, tools: Sequence[Mapping[str, Any]], previous: Turn) -> tuple[str | None, str]:
        """What the template writes after the sampled turn, or None and the reason why that cannot be told.

        Args:
            text: What the template makes of the whole conversation.
            tools: Tool schemas on offer.
            previous: The conversation's last turn.
        """
        if not text.startswith(previous.prompt_text):
            return None, self.reason(text, tools, previous)
        rest = text[len(previous.prompt_text) :]
        place = self._after(rest, _spoken(previous))
        if place is None:
            place = self._after_content(rest, previous)
        if place is None:
            place = self._after_same_meaning(rest, tools, previous)
        if place is None:
            return None, self.reason(text, tools, previous)
        end, terminator = place
        return rest[end + len(terminator) if previous.ended else end :], ""

    def stand_in(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], previous: Turn
    ) -> str | None:
        """What the template writes after a neutral turn in place of the sampled one; None where that fails.

        Args:
            messages: The whole conversation.
            tools: Tool schemas on offer.
            previous: The conversation's last turn.
        """
        said = len(previous.messages)
        neutral: dict[str, Any] = {"role": "assistant", "content": _STAND_IN}
        if calls := previous.message.get("tool_calls"):
            # Results are matched with calls by id and name; the last call's arguments show where the calls end.
            arguments: list[dict[str, str]] = [{}] * (len(calls) - 1) + [{"stand_in": _STAND_IN}]
            neutral = {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {**call, "function": {"name": call["function"]["name"], "arguments": given}}
                    for call, given in zip(calls, arguments, strict=True)
                ],
            }
        try:
            text = self._template.apply([*messages[:said], neutral, *messages[said + 1 :]], tools, to_sample=True)
        except UserError:
            return None
        _, found, after = text.rpartition(_STAND_IN)
        places = [(after.index(t), t) for t in self._terminators if t in after] if found else []
        if not places or (calls and not places[0][1]):  # nothing tells where the calls end
            return None
        at, terminator = min(places)
        if any(_shows(message, after[:at]) for message in messages[said + 1 :]):
            return None  # what follows stands inside the turn
        return after[at + len(terminator) if previous.ended else at :]

    def reason(self, text: str, tools: Sequence[Mapping[str, Any]], previous: Turn) -> str:
        """Why a prompt could not extend what was sampled (see `Step.rendering`).

        Args: as for `addition`.
        """
        if previous.tools is not tools and list(previous.tools) != list(tools):
            return "tools_changed"
        if previous.truncated:
            return "truncated_turn"
        thoughts = [
            thought
            for message in (*previous.messages, previous.message)
            if message.get("role") == "assistant" and (thought := self._thought(message)) is not None
        ]
        close = self._reader.reasoning.close if self._reader.reasoning is not None else "</think>"
        kept = [re.search(rf"{re.escape(thought)}\s*{re.escape(close)}", text) for thought in thoughts if thought]
        if len(kept) < len(thoughts) or not all(kept):
            return "thinking_stripped"
        if previous.prompt_text.rstrip().endswith(close):
            return "thinking_stripped"  # the generation prompt had empty thinking, which is gone
        return "template_rewrote_history"

    def _thought(self, message: Mapping[str, Any]) -> str | None:
        """What a message has of reasoning, also where it is content to us and not to the template."""
        thought = message.get("reasoning_content")
        if thought is None:
            before, found, _ = str(message.get("text") or message.get("content") or "").partition("</think>")
            thought = before.rpartition("<think>")[2] if found else None
        return None if thought is None else str(thought).strip()

    def _after(self, rest: str, turn: str, start: int = 0) -> tuple[int, str] | None:
        """Where a turn ends that `rest` has at `start`, and the terminator there."""
        if not rest.startswith(turn, start):
            return None
        end = start + len(turn)
        return next(((end, t) for t in self._terminators if rest.startswith(t, end)), None)

    def _after_content(self, rest: str, previous: Turn) -> tuple[int, str] | None:
        """The same for content that the template trims, or puts between spaces."""
        message = previous.message
        if message.get("tool_calls") or message.get("reasoning_content") is not None:
            return None
        content = str(message.get("content") or "").strip()
        start = len(rest) - len(rest.lstrip())
        if not rest.startswith(content, start):
            return None
        end = start + len(content)
        blank = len(rest) - len(rest[end:].lstrip())
        if not all(self._terminators):  # nothing tells the white space of the content from what follows
            return (end if content else 0), ""
        for place in (blank, end) if content else (blank,):
            if (found := self._after(rest, "", place)) is not None:
                return found
        return None

    def _after_same_meaning(
        self, rest: str, tools: Sequence[Mapping[str, Any]], previous: Turn
    ) -> tuple[int, str] | None:
        """The same for a turn that the template writes in other characters (the spaces of a call's JSON, say).

        What it wrote is read back, and has to mean what was sampled.
        """
        ends = [(rest.index(t), t) for t in self._terminators if t and t in rest]
        if not ends:
            return None
        end, terminator = min(ends)
        return (end, terminator) if self._means(previous.opener + rest[:end], previous.message, tools) else None

    def _means(self, turn: str, message: Message, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a turn's text, read back, is the message."""
        parsed = self._reader.parse(turn, turn, tools=tools)
        said = self._reader.parse(message.get("text", ""), message.get("text", ""), tools=tools)
        return (
            parsed.closed == said.closed
            and not parsed.invalid
            and not message.get("invalid_tool_calls")
            and parsed.content.strip() == (message.get("content") or "").strip()
            and (parsed.reasoning or "").strip() == (message.get("reasoning_content") or "").strip()
            and [call["function"] for call in parsed.tool_calls]
            == [call["function"] for call in message.get("tool_calls") or ()]
        )


def _shows(message: Mapping[str, Any], text: str) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and content.strip() in text


def _spoken(previous: Turn) -> str:
    """The turn's sampled text as a template that writes content as it is would show it."""
    message = previous.message
    if message.get("tool_calls") or message.get("reasoning_content") is not None:
        return str(message.get("text", ""))[len(previous.opener) :]
    return str(message.get("content") or "")
