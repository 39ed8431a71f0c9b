"""Messages to the ids a model is sent, and the ids it returned to a message.

A conversation's first prompt is rendered by the chat template. Every later prompt *extends* what was sampled: the
template says what comes between the end of the sampled turn and the next turn, only that is tokenised, and the
sampled ids stand as they are. Where the template (or the agent) rewrites what came before, the prompt is rendered anew
and says why; with `history: append` what was sampled stays all the same. With `turns: continue` a conversation is one
assistant turn, and later prompts are not rendered at all (`stepgym.model.open_turn`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any, Literal

import numpy as np

from stepgym.env.messages import Message
from stepgym.errors import UserError
from stepgym.model.call_format import find_tool_support
from stepgym.model.continuation import Continuation, Turn
from stepgym.model.delimiters import Delimiters
from stepgym.model.family import choose_family
from stepgym.model.open_turn import OpenTurn, check_turns
from stepgym.model.prompt import Prompt
from stepgym.model.reasoning import find_reasoning
from stepgym.model.template import find_turn_end
from stepgym.model.tool_calls import ParsedTurn
from stepgym.model.turn_reader import TurnReader
from stepgym.model.turn_writer import TurnWriter
from stepgym.record.step import Ids

__all__ = ["Prompt", "Renderer", "Turn"]

History = Literal["template", "append"]
Turns = Literal["conversation", "continue"]


class Renderer:
    """Renders prompts as a model is used to see them, always with the generation prompt, and parses responses.

    Args:
        tokenizer: A `transformers` tokenizer.
        chat_template: Jinja source that replaces the tokenizer's own.
        chat_template_kwargs: Variables for the template.
        today: The date that templates are told; None: the day this is made.
        kind: Who renders. `auto`: the renderer that the `renderers` library has for the model, where it writes the
            ids of the tokenizer's own template on a set of conversations, else that template; `template`: always the
            template; or a family of the library by name (`qwen3`, ...), whatever the tokenizer's template says.
        history: What becomes of earlier turns that the template would rewrite (by stripping their thinking, say).
            `template`: the template is followed, the prompt rendered anew. `append`: what was sampled stays, and
            what the template writes for the new messages is added.
        turns: What a turn of the model is. `conversation`: a message of its own in the template. `continue`: a part of
            one assistant turn, in which observations stand as they are: no roles, no terminator, no tools.
        max_observation_tokens: Under `continue`, most ids of one observation; the rest is cut off. None: all stay.

    Attributes:
        kind: Who renders in the end: `template`, or the family's name.
        history, turns, max_observation_tokens: As given.
        template: The chat template; `template.digest` names it.
        reasoning: The tags that the model thinks between; None for a template that knows no reasoning.
        terminator: Text of the token that ends an assistant's turn, `terminator_id` its id (None: there is none).
        stop_token_ids: Ids that end a response: the turn's terminator, that of a turn with tool calls, and the
            model's end of text.

    Raises:
        UserError: The tokenizer has no chat template, or a setting cannot be, alone or beside another.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        today: date | None = None,
        kind: str = "auto",
        history: History = "template",
        turns: Turns = "conversation",
        max_observation_tokens: int | None = None,
    ) -> None:
        if history not in ("template", "append"):
            raise UserError(f"renderer.history: {history!r} is not known; it is template or append")
        check_turns(turns, history, max_observation_tokens)
        self.tokenizer = tokenizer
        self.history: History = history
        self.turns: Turns = turns
        self.max_observation_tokens = max_observation_tokens
        self._fast: Any = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        self._family, self.template = choose_family(
            kind,
            tokenizer,
            chat_template=chat_template,
            kwargs=chat_template_kwargs,
            today=today,
            keep_thinking=history == "append",
            encode=self.encode,
        )
        self.kind = self._family.name if self._family is not None else "template"
        self._tools = find_tool_support(self.template)
        self.template.arguments_as_text = self._tools.arguments_as_text
        self.reasoning = find_reasoning(self.template)
        self._reader = TurnReader(self.reasoning, self._tools.format)
        self._delimiters = Delimiters(self._reader.delimiters, self.encode, self.decode)
        self._family_reads = self._family is not None and bool(self._tools.turn) and self._tools.format is None
        self._continuation = Continuation(self.template, self._reader, self._find_terminators())
        self._writer = TurnWriter(self.template, self.reasoning, self._tools.with_ids, self._terminators.values())
        self._open_turn = OpenTurn(self.encode, self.stop_token_ids, max_observation_tokens)
        self._anchored = self.terminator_id is not None and any(
            self.encode(self.terminator + text).tolist() != [self.terminator_id, *self.encode(text).tolist()]
            for text in ("x", " x", "\n", "\nx", "\n\nx")
        )

    def _find_terminators(self) -> list[str]:
        """Find which tokens end a turn: the first special token after an answer, and after a call.

        Returns what a template writes at the end of a turn. One that writes no special token there ends it with
        nothing: the end of text that a model samples then stays in the ids, and the template's text goes on after it.
        """
        end = self.tokenizer.eos_token_id
        special = {end, *self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        after_answer = [i for i in self.encode(find_turn_end(self.template)).tolist() if i in special]
        self.terminator_id: int | None = after_answer[0] if after_answer else end
        found = {self.terminator_id}
        if self._tools.format is not None and (after_call := self.encode(self._tools.turn.rstrip()).tolist()):
            last = after_call[-1]
            if last in special and self.decode([last]) not in self._tools.format.delimiters:
                found.add(last)
        self._terminators = {i: self.decode([i]) for i in found if i is not None}
        self.terminator = "" if self.terminator_id is None else self._terminators[self.terminator_id]
        library = self._family.stop_token_ids if self._family is not None else ()
        ends = (self.terminator_id, *self._terminators, end, *library)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        # Tokens that a turn has only when it calls: with one of them a turn is no answer, whatever the library says.
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        answer = set(self.encode(self.template.apply(said, to_sample=False)).tolist())
        in_call = set(self.encode(self._tools.turn).tolist()) if self._family_reads else set()
        self._call_tokens = (in_call & special) - answer - set(self.stop_token_ids)
        return list(self._terminators.values()) if after_answer else [""]

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
            previous: The conversation's last turn; its messages and its answer must be how `messages` starts. None
                renders the conversation from scratch, which under `turns: continue` opens a turn.

        Raises `UserError` when the template refuses the conversation, shows no tools, or writes calls in a format
        that is not known, and for tools under `turns: continue`.
        """
        if tools:
            self._check_tools()
        if previous is not None and self.turns == "continue":
            goes_on = self._open_turn.prompt(messages, previous, reasoning_open=self._left_reasoning_open(previous))
            if goes_on is not None:
                return goes_on
        text = self.template.apply(messages, tools, to_sample=True)
        opener = self.opener(text)
        is_open = bool(opener)
        if previous is None or self.turns == "continue":
            reason = "first" if previous is None else "turn_closed"
            return Prompt(text, self._render(text, messages, tools), False, reason, opener, is_open)
        addition, reason = self._continuation.addition(text, tools, previous)
        if addition is not None:
            ids = self._extend(addition, messages, tools, previous)
            return Prompt(text, ids, True, "appended" if previous.appended else "extended", opener, is_open)
        if self.history == "append" and reason != "tools_changed":
            stays = self._append(messages, tools, previous)
            if stays is not None:
                return Prompt(text, stays, True, "appended", opener, is_open)
        return Prompt(text, self._render(text, messages, tools), False, reason, opener, is_open)

    def generation_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """What the template adds to a conversation to sample from; "" for templates with nothing of their own.

        Raises `UserError` when the template refuses the conversation.
        """
        return self.template.generation_prompt(messages, tools)

    def opener(self, prompt_text: str) -> str:
        """The end of a prompt that leaves reasoning open (`<think>\\n`, say); "" where none is."""
        return self.reasoning.opener(prompt_text) if self.reasoning is not None else ""

    def _left_reasoning_open(self, previous: Turn) -> bool:
        return previous.response_ids is not None and self.leaves_reasoning_open(
            previous.message,
            previous.response_ids,
            opener=previous.opener,
            reasoning_open=previous.reasoning_open,
        )

    def leaves_reasoning_open(
        self, message: Mapping[str, Any], response_ids: Ids, *, opener: str = "", reasoning_open: bool = False
    ) -> bool:
        """Whether reasoning goes on where a response ends.

        Args:
            message: What the response was read as.
            response_ids: int32 array [R] as the engine returned it.
            opener, reasoning_open: As of the prompt that was answered.
        """
        # Reasoning that never ends leaves no content; so does one that ends with nothing after it, which ids tell.
        if self.reasoning is None or message.get("content"):
            return False
        begin = opener or (self.reasoning.open if reasoning_open else "")
        if not begin and message.get("reasoning_content") is None:
            return False
        ended = len(response_ids) and int(response_ids[-1]) in self.stop_token_ids
        spoken = response_ids[:-1] if ended else response_ids
        text = self.decode(spoken)
        return not self._reader.parse(begin + text, begin + self._delimiters.shadow(text, spoken)).closed

    def _check_tools(self) -> None:
        if self.turns == "continue":
            raise UserError("turns: continue has no place for tool calls; use tag actions")
        if not self._tools.shown:
            raise UserError(
                f"model {self.template.name}: the chat template does not show tools; "
                "use a model whose template does, or the environment's tag actions"
            )
        if self._tools.format is None and not self._family_reads:
            raise UserError(
                f"model {self.template.name}: the chat template writes tool calls in a format that is not known, so "
                "they could not be recognised; use another model, or the environment's tag actions"
            )

    def _render(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Ids:
        """Ids of a whole prompt."""
        return self._family.render(messages, tools) if self._family is not None else self.encode(text)

    def _extend(
        self,
        addition: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        previous: Turn,
    ) -> Ids:
        """Ids of what follows the sampled turn.

        They are the template's. A family that is the template itself knows ids that its text does not tell.
        """
        bridged = self._bridge(messages, tools, previous) if not self.template.source else None
        unsampled = self._without_sampled(addition, previous)
        if bridged is not None and self.decode(bridged) == unsampled:
            return bridged
        return self._encode_after_turn(unsampled)

    def _append(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], previous: Turn
    ) -> Ids | None:
        bridged = self._bridge(messages, tools, previous)
        if bridged is not None:
            return bridged
        addition = self._continuation.stand_in(messages, tools, previous)
        return None if addition is None else self._encode_after_turn(self._without_sampled(addition, previous))

    def _without_sampled(self, addition: str, previous: Turn) -> str:
        """What follows a turn, without its first token where the model sampled that.

        Where a template writes nothing at a turn's end, the model stops at what begins the next one (`<|user|>`).
        """
        if previous.ended or previous.response_ids is None or not len(previous.response_ids):
            return addition
        last = int(previous.response_ids[-1])
        return addition.removeprefix(self.decode([last])) if last in self.stop_token_ids else addition

    def _encode_after_turn(self, text: str) -> Ids:
        """int32 ids of text as the tokenizer writes it after a token that ended a turn.

        Some write the start of a text in another way, and some tokens swallow the white space that follows them.
        """
        if not self._anchored:
            return self.encode(text)
        return self.encode(self.terminator + text)[1:]

    def _bridge(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], previous: Turn
    ) -> Ids | None:
        if self._family is None or previous.prompt_ids is None or previous.response_ids is None:
            return None
        news = messages[len(previous.messages) + 1 :]
        return self._family.extend(previous.prompt_ids, previous.response_ids, news, tools)

    # ---- responses ----------------------------------------------------------------------------------------------

    def read(
        self,
        response_ids: Ids,
        *,
        stop: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        id_prefix: str,
        opener: str = "",
        reasoning_open: bool = False,
    ) -> tuple[Message, bool]:
        """The assistant message that response ids stand for, and whether they end in a turn's terminator.

        The text ends at the first stop string, kept; ids that overshoot it stay in the record but not in the message.
        Reasoning that never ends leaves no content; `text` has all of it.

        Args:
            response_ids: int32 array [R] as the engine returned it.
            stop: Strings that ended the response.
            tools: Tool schemas that were on offer; without any nothing is a tool call.
            id_prefix: Call ids are `{id_prefix}_{index}` where the model writes none.
            opener: What the prompt ended in that left reasoning open (`Prompt.opener`); `text` begins with it.
            reasoning_open: Whether the response begins inside reasoning, with or without an opener before it.
        """
        begin = opener or (self.reasoning.open if reasoning_open and self.reasoning is not None else "")
        spoken, ended = response_ids, False
        if len(spoken) and int(spoken[-1]) in self.stop_token_ids:
            ended = int(spoken[-1]) in self._terminators
            spoken = spoken[:-1]
        whole = self.decode(spoken)
        text = _cut_after_stop(whole, stop)
        if self._family_reads:
            parsed = self._read_with_family(spoken, text, len(text) < len(whole), tools, id_prefix, begin)
        elif not begin and self._reader.is_plain(text, tools=bool(tools)):
            parsed = ParsedTurn(text)
        else:
            shadow = begin + self._delimiters.shadow(whole, spoken)[: len(text)]
            parsed = self._reader.parse(begin + text, shadow, tools=tools, id_prefix=id_prefix)
        return _message(opener + text, parsed), ended

    def _read_with_family(
        self, ids: Ids, text: str, cut: bool, tools: Sequence[Mapping[str, Any]], id_prefix: str, opener: str
    ) -> ParsedTurn:
        assert self._family is not None
        ids = self.encode(text) if cut else ids
        parsed = self._family.parse(ids, self.encode(opener) if opener else None, tools, id_prefix=id_prefix)
        if not tools or parsed.tool_calls or parsed.invalid:
            return parsed
        close = self.encode(self.reasoning.close) if self.reasoning is not None else ids[:0]
        places = np.flatnonzero(ids == close[0]) if len(close) == 1 else close
        rest = ids[places[-1] :] if len(places) else ids  # calls in reasoning that ended were drafts
        if self._call_tokens.intersection(rest.tolist()):
            error = "parts of a tool call that do not make one"
            return replace(parsed, content="", invalid=[{"text": text.strip()[:2000], "error": error}])
        return parsed

    def encode_response(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any] | str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        prompt: Prompt | None = None,
    ) -> Ids:
        """int32 ids that a model would have sampled to say `message`.

        They are its text and, unless a stop string ends it, the terminator. A message with tool calls or reasoning and
        no `text` is written as the template writes it. Reasoning that is open is closed first.

        Args:
            messages: The whole conversation.
            message: What to say.
            tools: Tool schemas on offer.
            stop: Strings that end the response.
            prompt: The prompt that is answered; None: the one that `messages` are rendered to from scratch.

        Raises `UserError` for a message that the template does not write where its generation prompt says it stands,
        and for tool calls under `turns: continue`.
        """
        if isinstance(message, str):
            message = {"role": "assistant", "content": message, "text": message}
        if self.turns == "continue" and message.get("tool_calls"):
            self._check_tools()
        if prompt is not None:
            opener, is_open = prompt.opener, prompt.reasoning_open
        else:
            opener = self.opener(self.template.apply(messages, tools, to_sample=True)) if self.reasoning else ""
            is_open = bool(opener)
        text = self._writer.text(
            messages,
            message,
            tools,
            opener=opener,
            reasoning_open=is_open,
            in_open_turn=prompt is not None and prompt.in_open_turn,
        )
        ids = self.encode(text)
        if (stop and text.endswith(tuple(stop))) or (len(ids) and int(ids[-1]) in self.stop_token_ids):
            return ids
        return self.encode(text + self.terminator)


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
