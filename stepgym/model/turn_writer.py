"""From a message to the text of a turn: what a model would have said to say it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepgym.errors import UserError
from stepgym.model.reasoning import ReasoningTags
from stepgym.model.template import Template


class TurnWriter:
    """Writes turns for scripts, as the model's template has them.

    Args:
        template: The model's template.
        reasoning: The tags that the model thinks between; None: it knows no reasoning.
        with_ids: Gives the tool calls of a message the ids that the template wants.
        terminators: What may end a turn.
    """

    def __init__(
        self,
        template: Template,
        reasoning: ReasoningTags | None,
        with_ids: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        terminators: Iterable[str],
    ) -> None:
        self._template = template
        self._reasoning = reasoning
        self._with_ids = with_ids
        self._terminators = tuple(terminators)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        *,
        opener: str,
        reasoning_open: bool,
        in_open_turn: bool,
    ) -> str:
        """The text of a turn, without its terminator.

        A message's `text` is taken as it is, but for reasoning that is open already. One with tool calls or reasoning
        and no `text` is written as the template writes it; inside an open turn, where no template writes, between the
        model's tags.

        Args:
            messages: The whole conversation.
            message: What to say.
            tools: Tool schemas on offer.
            opener, reasoning_open, in_open_turn: As of the prompt that is answered.

        Raises `UserError` for a message that the template does not write where its generation prompt says it stands.
        """
        written = bool(message.get("tool_calls") or message.get("reasoning_content"))
        if "text" in message or not written:
            text = str(message.get("text", message.get("content") or ""))
            return self._inside_reasoning(text, opener) if reasoning_open else text
        if in_open_turn:
            return self._as_thought(message, reasoning_open)
        return self._as_template_writes(messages, self._with_ids(message), tools, opener)

    def _inside_reasoning(self, text: str, opener: str) -> str:
        """What is left to say of a turn's text where reasoning is open already."""
        if self._reasoning is None:
            return text
        if opener and text.startswith(opener):
            return text[len(opener) :]
        if not opener and self._reasoning.close in text.partition(self._reasoning.open)[0]:
            return text  # it ends what the turn before left open
        if text.lstrip().startswith(self._reasoning.open):
            return text.lstrip()[len(self._reasoning.open) :].lstrip("\n")
        return f"\n{self._reasoning.close}\n\n{text}"

    def _as_thought(self, message: Mapping[str, Any], reasoning_open: bool) -> str:
        thought, content = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
        if self._reasoning is None:
            return content  # as a template that knows no reasoning writes it
        begin = "" if reasoning_open else f"{self._reasoning.open}\n"
        return f"{begin}{thought}\n{self._reasoning.close}\n\n{content}"

    def _as_template_writes(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        opener: str,
    ) -> str:
        head = self._template.apply(messages, tools, to_sample=True)
        closed = self._template.apply([*messages, message], tools, to_sample=False)
        if closed.startswith(head):
            return self._without_terminator(closed[len(head) :])
        bare = head[: len(head) - len(opener)]
        if self._reasoning is not None and closed.startswith(bare):  # the template strips or skips the reasoning
            said = _without_reasoning(self._without_terminator(closed[len(bare) :]), self._reasoning)
            thought = str(message.get("reasoning_content") or "")
            if not opener:
                return f"{self._reasoning.open}\n{thought}\n{self._reasoning.close}\n\n{said}" if thought else said
            return f"{thought}\n{self._reasoning.close}\n\n{said}"
        raise UserError("the chat template does not write a turn where its generation prompt says it stands")

    def _without_terminator(self, turn: str) -> str:
        for terminator in self._terminators:
            before, found, after = turn.rpartition(terminator)
            if found and not after.strip():
                return before
        return turn


def _without_reasoning(turn: str, tags: ReasoningTags) -> str:
    """What a template writes of a turn after its reasoning, which may be empty, or only closed."""
    text = turn.lstrip("\n")
    if text.startswith((tags.open, tags.close)):
        _, closed, rest = text.partition(tags.close)
        return rest.lstrip("\n") if closed else turn
    return turn
