"""Messages to the ids a model is sent, and the ids it returned to a message.

A conversation's first prompt is rendered by the chat template. Every later prompt *extends* what was sampled: the
template says what comes between the end of the sampled turn and the next turn, only that is tokenised, and the
sampled ids stand as they are. Where the template (or the agent) rewrites what came before, the prompt is rendered anew
and says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from stepgym.env.messages import Message
from stepgym.errors import UserError
from stepgym.model.template import ChatTemplate
from stepgym.model.tool_calls import ParsedTurn, parse_turn
from stepgym.record.step import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One prompt and what was sampled for it: all that the next prompt depends on.

    Attributes:
        messages: The messages that the prompt was rendered from.
        prompt_text: What the template made of them.
        message: The assistant message that came back.
        ended: Whether the response ended in the turn's terminator.
        truncated: Whether it was cut by a length limit.
    """

    messages: Sequence[Mapping[str, Any]]
    prompt_text: str
    message: Message
    ended: bool
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt to sample from.

    Attributes:
        text: What the template made of the messages.
        new_ids: int32 ids to add to the previous turn's prompt and response, or the whole prompt if not `extends`.
        extends: Whether the previous turn's ids stay.
        rendering: `first`, `extended`, or why it was rendered anew (see `Step.rendering`).
    """

    text: str
    new_ids: Ids
    extends: bool
    rendering: str


class Renderer:
    """Renders prompts under a model's chat template, always with the generation prompt, and parses responses.

    Args:
        tokenizer: A `transformers` tokenizer.
        chat_template: Jinja source that replaces the tokenizer's own.
        chat_template_kwargs: Variables for the template.
        today: The date that templates are told; None: the day this is made.

    Raises `UserError` for a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, source=chat_template, kwargs=chat_template_kwargs, today=today)
        self._fast: Any = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        end_ids = self.encode(self.template.turn_end).tolist()
        self.terminator_id: int | None = end_ids[0] if end_ids else tokenizer.eos_token_id
        """Id of the token that ends an assistant's turn."""
        self.terminator = "" if self.terminator_id is None else str(tokenizer.decode([self.terminator_id]))
        ends = (self.terminator_id, tokenizer.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        """Ids that end a response: the turn's terminator and the model's end of text."""
        self._tools_in_template = "<tool_call>" in self.template.source

    def encode(self, text: str) -> Ids:
        """int32 ids of a text, with no special tokens added."""
        if self._fast is not None:  # the same ids, without the wrapper's cost per call
            return np.asarray(self._fast.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of ids, special tokens shown."""
        if self._fast is not None:
            plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
            return str(self._fast.decode(plain, skip_special_tokens=False))
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # ---- prompts ------------------------------------------------------------------------------------------------

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        previous: Turn | None = None,
    ) -> Prompt:
        """The prompt for the next turn of a conversation.

        Args:
            messages: The whole conversation.
            tools: Tool schemas on offer.
            previous: The conversation's last turn; its messages and its answer must be how `messages` starts.

        Raises `UserError` when the template refuses the conversation, or has no way to show tools.
        """
        if tools and not self._tools_in_template:
            raise UserError(
                "the chat template has no <tool_call> format, so tool calls could not be recognised; "
                "use a model whose template shows tools, or the environment's tag actions"
            )
        text = self.template.apply(messages, tools, to_sample=True)
        if previous is None:
            return Prompt(text, self.encode(text), extends=False, rendering="first")
        addition, reason = self._addition(text, messages, tools, previous)
        if addition is None:
            return Prompt(text, self.encode(text), extends=False, rendering=reason)
        return Prompt(text, self.encode(addition), extends=True, rendering="extended")

    def _addition(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], previous: Turn
    ) -> tuple[str | None, str]:
        """What the template writes after the sampled turn, or None and the reason why that cannot be told."""
        message = previous.message
        if not text.startswith(previous.prompt_text):
            return None, self._reason(previous)
        rest = text[len(previous.prompt_text) :]
        end = _after(rest, _spoken(message), self.terminator)
        if end is None:
            # The template may write the same turn in other characters (the spaces of a tool call's JSON, say): what
            # it wrote is then read back, and has to mean what was sampled.
            closed = self.template.apply(messages[: len(previous.messages) + 1], tools, to_sample=False)
            if not closed.startswith(previous.prompt_text):
                return None, self._reason(previous)
            turn, found, _ = closed[len(previous.prompt_text) :].rpartition(self.terminator)
            if not found or not self._means(turn, message, bool(tools)):
                return None, self._reason(previous)
            end = _after(rest, turn, self.terminator)
            if end is None:
                return None, self._reason(previous)
        if previous.ended:
            end += len(self.terminator)
        return rest[end:], ""

    def _means(self, turn: str, message: Message, tools: bool) -> bool:
        """Whether a turn's text, read back, is the message."""
        parsed = parse_turn(turn, tools=tools, reasoning=self.template.knows_reasoning)
        return (
            not parsed.invalid
            and not message.get("invalid_tool_calls")
            and parsed.content.strip() == (message.get("content") or "").strip()
            and (parsed.reasoning or "").strip() == (message.get("reasoning_content") or "").strip()
            and [call["function"] for call in parsed.tool_calls]
            == [call["function"] for call in message.get("tool_calls") or ()]
        )

    def _reason(self, previous: Turn) -> str:
        if previous.truncated:
            return "truncated_turn"
        if "</think>" in previous.message.get("text", ""):
            return "thinking_stripped"
        return "template_rewrote_history"

    # ---- responses ----------------------------------------------------------------------------------------------

    def read(
        self, response_ids: Ids, *, stop: Sequence[str], tools: Sequence[Mapping[str, Any]], id_prefix: str
    ) -> tuple[Message, bool]:
        """The assistant message that response ids stand for, and whether they end in the turn's terminator.

        The text ends at the first stop string, kept; ids that overshoot it stay in the record but not in the message.
        """
        spoken, ended = response_ids, False
        if len(spoken) and int(spoken[-1]) in self.stop_token_ids:
            ended = int(spoken[-1]) == self.terminator_id
            spoken = spoken[:-1]
        text = _cut_after_stop(self.decode(spoken), stop)
        parsed = parse_turn(text, tools=bool(tools), reasoning=self.template.knows_reasoning, id_prefix=id_prefix)
        return _message(text, parsed), ended

    def encode_response(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any] | str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
    ) -> Ids:
        """int32 ids that a model would have sampled to say `message`.

        They are its text and, unless a stop string ends it, the terminator. A message with tool calls and no `text` is
        written as the template writes it.
        """
        if isinstance(message, str):
            text = message
        elif "text" in message or not message.get("tool_calls"):
            text = str(message.get("text", message.get("content") or ""))
        else:
            head = self.template.apply(messages, tools, to_sample=True)
            closed = self.template.apply([*messages, message], tools, to_sample=False)
            if not closed.startswith(head):
                raise UserError("the chat template does not write a turn where its generation prompt says it stands")
            text = closed[len(head) :].rpartition(self.terminator)[0]
        if text.endswith(tuple(stop)) and stop:
            return self.encode(text)
        return self.encode(text + self.terminator)


def _spoken(message: Message) -> str:
    """The turn's text as a template that writes content as it is would show it."""
    if message.get("tool_calls") or message.get("reasoning_content"):
        return str(message.get("text", ""))
    return str(message.get("content") or "")


def _after(rest: str, turn: str, terminator: str) -> int | None:
    """Where `rest` goes on after `turn`, if it starts with it and the turn ends there."""
    if rest.startswith(turn) and rest.startswith(terminator, len(turn)):
        return len(turn)
    return None


def _cut_after_stop(text: str, stop: Sequence[str]) -> str:
    ends = [index + len(s) for s in stop if (index := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def _message(text: str, parsed: ParsedTurn) -> Message:
    message: Message = {"role": "assistant", "content": parsed.content, "text": text}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = parsed.tool_calls
    if parsed.invalid:
        message["invalid_tool_calls"] = parsed.invalid
    return message
