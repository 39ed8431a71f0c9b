"""A model's chat template: messages and tools to text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

from stepgym.errors import UserError

_PROBE = "stepgym-probe-7f3a"


class Template(ABC):
    """Writes conversations as a model is used to see them. `renderer.template` is one.

    Attributes:
        name: Of the model, for messages to people.
        source: Text of the Jinja template; empty where the `renderers` library writes instead.
        kwargs: Variables for the template.
        today: The date that the template is told.
        arguments_as_text: Whether it wants tool calls' arguments as JSON text (most want a mapping).
    """

    name: str
    source: str
    kwargs: dict[str, Any]
    today: date
    arguments_as_text: bool = False

    def apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, to_sample: bool
    ) -> str:
        """Render a conversation. `to_sample` adds the generation prompt.

        Raises `UserError` when the template refuses the conversation (two user messages in a row, say).
        """
        return self._write(for_template(messages, as_text=self.arguments_as_text), [dict(t) for t in tools], to_sample)

    @abstractmethod
    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], to_sample: bool) -> str: ...

    def generation_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """What the template adds to a conversation for the model to go on; "" for templates with nothing of their own.

        Raises `UserError` when the template refuses the conversation.
        """
        asked = self.apply(messages, tools, to_sample=True)
        told = self.apply(messages, tools, to_sample=False)
        return asked[len(told) :] if asked.startswith(told) else ""

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the template, its variables and its date."""
        content = json.dumps(self._identity(), sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _identity(self) -> list[Any]:
        return [self.source, self.kwargs, self.today.isoformat()]


class ChatTemplate(Template):
    """The Jinja chat template of a tokenizer, with everything that it may depend on frozen.

    Args:
        tokenizer: A `transformers` tokenizer.
        source: Template text; None takes the tokenizer's own.
        kwargs: Passed to the template as variables (`enable_thinking`, ...).
        today: What `strftime_now` tells a template that asks for the date. None takes the date of construction, so
            that a run that lasts past midnight does not change its prompts.

    Raises:
        UserError: The tokenizer has no chat template, or the template does not compile.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> None:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        self.name = model_name(tokenizer)
        with_tools = source
        if source is None:
            # Some tokenizers carry several templates by name.
            own: Any = getattr(tokenizer, "chat_template", None)
            source = own.get("default") if isinstance(own, Mapping) else own
            with_tools = own.get("tool_use", source) if isinstance(own, Mapping) else own
        if not source:
            raise UserError(
                f"model {self.name}: the tokenizer has no chat template; use an instruct model, "
                "or give one with renderer.chat_template"
            )
        self.source = source
        self._source_with_tools = with_tools or source
        self.kwargs = dict(kwargs or {})
        self.today = today or date.today()
        now = datetime.combine(self.today, datetime.min.time())
        specials = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self._variables = {**specials, "strftime_now": now.strftime, **self.kwargs}
        self._render: Any = render_jinja_template
        self._refusal = TemplateError

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], to_sample: bool) -> str:
        try:
            rendered, _ = self._render(
                conversations=[messages],
                tools=tools or None,
                chat_template=self._source_with_tools if tools else self.source,
                add_generation_prompt=to_sample,
                **self._variables,
            )
        except self._refusal as error:
            raise UserError(f"model {self.name}: the chat template refuses the conversation: {error}") from None
        except Exception as error:  # code inside a template fails as Python does
            raise UserError(
                f"model {self.name}: the chat template fails on the conversation: {type(error).__name__}: {error}"
            ) from None
        return str(rendered[0])

    def _identity(self) -> list[Any]:
        other = self._source_with_tools
        return [*super()._identity(), *([other] if other != self.source else [])]


def find_turn_end(template: Template) -> str:
    """What a template writes right after an assistant's content, up to the next message.

    Raises `UserError` for a template that does not show the content.
    """
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
    _, found, end = template.apply(messages, to_sample=False).rpartition(_PROBE)
    if not found:
        raise UserError(f"model {template.name}: the chat template does not show an assistant's content")
    return end


def model_name(tokenizer: Any) -> str:
    """What to call a tokenizer's model in messages to people."""
    return getattr(tokenizer, "name_or_path", "") or "the tokenizer"


def for_template(messages: Sequence[Mapping[str, Any]], *, as_text: bool = False) -> list[dict[str, Any]]:
    """Messages as templates expect them: our own fields stay away, tool calls' arguments are mappings (or text)."""
    shown = []
    for message in messages:
        plain = {k: v for k, v in message.items() if k not in ("text", "invalid_tool_calls")}
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_with_arguments(call, as_text) for call in plain["tool_calls"]]
        shown.append(plain)
    return shown


def _with_arguments(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            pass  # a template may still show the text as it is
    return {**call, "function": function}
