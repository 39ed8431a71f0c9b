"""From a turn's text to its parts: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepgym.model.reasoning import ReasoningTags, split_reasoning
from stepgym.model.tool_calls import ParsedTurn, ToolCallFormat, wire_calls


class TurnReader:
    """Takes turns apart in the format that a model writes.

    Args:
        reasoning: The tags that the model thinks between; None: nothing is reasoning.
        calls: How it writes tool calls; None: nothing is a call.
    """

    def __init__(self, reasoning: ReasoningTags | None, calls: ToolCallFormat | None) -> None:
        self.reasoning = reasoning
        self.calls = calls
        self.delimiters = (
            *((reasoning.open, reasoning.close) if reasoning else ()),
            *(calls.delimiters if calls else ()),
        )
        """Texts that set the parts of a turn apart."""
        self._calls_are_marked = calls is None or calls.marked

    def is_plain(self, text: str, *, tools: bool) -> bool:
        """Whether a turn has nothing in it that sets parts apart: it is all content."""
        if tools and not self._calls_are_marked:
            return False
        return not any(delimiter in text for delimiter in self.delimiters)

    def parse(
        self, text: str, shadow: str, *, tools: Sequence[Mapping[str, Any]] = (), id_prefix: str = "call"
    ) -> ParsedTurn:
        """Take a turn apart.

        Args:
            text: The turn, with the reasoning opener that its prompt ended in, without its terminator.
            shadow: The same with delimiters blotted out that are only spelled (see `Delimiters`).
            tools: What was on offer; without tools nothing is a tool call.
            id_prefix: Call ids are `{id_prefix}_{index}` where the model gives none.
        """
        thought, start = None, 0
        if self.reasoning is not None:
            split = split_reasoning(text, shadow, self.reasoning)
            if not split.closed:
                return self._open(text, shadow, split.reasoning, bool(tools))
            thought, start = split.reasoning, split.start
        turn = ParsedTurn(content=text[start:], reasoning=thought)
        if not tools or self.calls is None:
            return turn
        calls = self.calls.read(text[start:], shadow[start:], tools)
        return replace(
            turn,
            content=calls.content,
            tool_calls=wire_calls(calls.found, id_prefix, short_ids=self.calls.short_ids),
            invalid=calls.invalid,
        )

    def _open(self, text: str, shadow: str, thought: str | None, tools: bool) -> ParsedTurn:
        """A turn whose reasoning never ends: a call in it was not made, and must not pass for an answer."""
        assert self.reasoning is not None
        invalid = []
        if tools and self.calls is not None and self.calls.looks_like_call(shadow):
            error = f"a tool call inside reasoning that {self.reasoning.close} never ends"
            invalid.append({"text": text.strip()[-2000:], "error": error})
        return ParsedTurn(content="", reasoning=thought, invalid=invalid, closed=False)
