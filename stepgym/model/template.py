"""A model's chat template: messages and tools to text, and what ends a turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

from stepgym.errors import UserError

_PROBE = "stepgym-probe-7f3a"


class ChatTemplate:
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

        self._name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        if source is None:
            # Some tokenizers carry several templates by name.
            own: Any = getattr(tokenizer, "chat_template", None)
            source = own.get("default") if isinstance(own, Mapping) else own
        if not source:
            raise UserError(
                f"model {self._name}: the tokenizer has no chat template; use an instruct model, "
                "or give one with renderer.chat_template"
            )
        self.source: str = source
        self.kwargs = dict(kwargs or {})
        self.today = today or date.today()
        now = datetime.combine(self.today, datetime.min.time())
        specials = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self._variables = {**specials, "strftime_now": now.strftime, **self.kwargs}
        self._render: Any = render_jinja_template
        self._template_error = TemplateError
        self.generation_prompt_used = "add_generation_prompt" in source
        self.knows_reasoning = "reasoning_content" in source
        self.turn_end = self._find_turn_end()

    def apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, to_sample: bool
    ) -> str:
        """Render a conversation. `to_sample` adds the generation prompt.

        Raises `UserError` when the template refuses the conversation (two user messages in a row, say).
        """
        try:
            rendered, _ = self._render(
                conversations=[_for_template(messages)],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.source,
                add_generation_prompt=to_sample,
                **self._variables,
            )
        except self._template_error as error:
            raise UserError(f"model {self._name}: the chat template refuses the conversation: {error}") from None
        return str(rendered[0])

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the template, its variables and its date."""
        content = json.dumps([self.source, self.kwargs, self.today.isoformat()], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _find_turn_end(self) -> str:
        """What the template writes right after an assistant's content, up to the next message."""
        closed = self.apply(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}], to_sample=False
        )
        _, found, end = closed.rpartition(_PROBE)
        if not found:
            raise UserError(f"model {self._name}: the chat template does not show an assistant's content")
        return end


def _for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: OpenAI's JSON-text arguments become mappings, our own fields stay away."""
    shown = []
    for message in messages:
        plain = {k: v for k, v in message.items() if k not in ("text", "invalid_tool_calls")}
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in plain["tool_calls"]]
        shown.append(plain)
    return shown


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            pass  # a template may still show the text as it is
    return {**call, "function": function}
