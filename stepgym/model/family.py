"""Model families that the `renderers` library knows: rendering, extending and parsing in ids.

Its renderers are Python that mirrors a family's template. They are trusted as far as they agree with the tokenizer's
own template; where they do, the template stays the judge of what a prompt says.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np

from stepgym.errors import UserError
from stepgym.model.template import ChatTemplate, Template, for_template, model_name
from stepgym.model.tool_calls import Call, ParsedTurn, arguments_error, wire_calls
from stepgym.record.step import Ids

logger = logging.getLogger(__name__)

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_SYSTEM, _ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Narn?\n\nSay."}
_SAID = {"role": "assistant", "content": "In the north – far away."}
_THOUGHT = {"role": "assistant", "content": "In the north.", "reasoning_content": "Narn is\nfar away."}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0_0", "type": "function", "function": {"name": "look_up", "arguments": {"key": "N"}}}],
}
_RESULT = {"role": "tool", "content": "north", "tool_call_id": "call_0_0", "name": "look_up"}
PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([_ASK], []),
    ([_SYSTEM, _ASK], []),
    ([_SYSTEM, _ASK, _SAID, _ASK], []),
    ([_ASK, _THOUGHT, _ASK, _SAID, _ASK], []),
    ([_ASK], [_TOOL]),
    ([_SYSTEM, _ASK, _CALL, _RESULT], [_TOOL]),
    ([_SYSTEM, _ASK, {**_CALL, "reasoning_content": "Look."}, _RESULT, _RESULT, _THOUGHT, _ASK], [_TOOL]),
)
"""Conversations, with tools, on which a family must write the template's ids to be taken for it."""


class Family:
    """A renderer of the `renderers` library, for one tokenizer.

    Args:
        name: As the library calls it (`qwen3`, ...).
        tokenizer: A `transformers` tokenizer.
        kwargs: Template variables that the library knows for the family.
        today: The date, for families whose prompts tell it.
        keep_thinking: Whether extending keeps earlier thinking that the template would strip.

    Raises:
        UserError: The library knows no such family, takes no such variable, or the tokenizer is another family's.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        today: date | None = None,
        keep_thinking: bool = False,
    ) -> None:
        import renderers

        self.name = name
        self._renderer: Any = None
        if name not in known_families():
            raise UserError(
                f"renderer.kind: {name!r} is not known; it is auto, template, or one of {', '.join(known_families())}"
            )
        config = renderers.config_from_name(name)
        variables = dict(kwargs or {})
        day = today or date.today()
        fields = type(config).template_field_names()
        if "date_string" in fields:
            variables.setdefault("date_string", day.strftime("%d %b %Y"))
        if "conversation_start_date" in fields:
            variables.setdefault("conversation_start_date", day.isoformat())
        try:
            config = renderers.merge_chat_template_kwargs(config, variables)
            if keep_thinking and config.thinking_retention is None:
                config = type(config).model_validate(
                    {**config.model_dump(exclude_unset=True), "name": name, "thinking_retention": "all"}
                )
            self._renderer = renderers.create_renderer(tokenizer, config)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"renderer.kind {name}: not for model {model_name(tokenizer)}: {reason}") from None
        self._config = config.model_dump(mode="json")
        self._version = str(renderers.__version__)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""
        return tuple(self._renderer.get_stop_token_ids())

    @property
    def facts(self) -> dict[str, Any]:
        """What its prompts depend on besides the tokenizer: the library's version and settings."""
        return {"family": self.name, "renderers": self._version, **self._config}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, to_sample: bool = True
    ) -> Ids:
        """int32 ids of a conversation. Raises `UserError` when the family cannot show it."""
        try:
            ids = self._renderer.render_ids(
                for_template(messages), tools=[dict(tool) for tool in tools] or None, add_generation_prompt=to_sample
            )
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"renderer {self.name} cannot show the conversation: {reason}") from None
        return np.asarray(ids, dtype=np.int32)

    def extend(
        self, prompt_ids: Ids, response_ids: Ids, news: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Ids | None:
        """int32 ids to add to a prompt and its response for the next prompt; None where the library sees no way."""
        before = [*prompt_ids.tolist(), *response_ids.tolist()]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before[: len(prompt_ids)],
                before[len(prompt_ids) :],
                for_template(news),
                tools=[dict(tool) for tool in tools] or None,
            )
        except Exception as error:  # what it cannot extend is rendered anew
            logger.debug("renderer %s: not extended: %s", self.name, error)
            return None
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return np.asarray(bridged.token_ids[len(before) :], dtype=np.int32)

    def parse(
        self,
        ids: Ids,
        prompt_ids: Ids | None,
        tools: Sequence[Mapping[str, Any]],
        *,
        id_prefix: str,
    ) -> ParsedTurn:
        """Take a turn apart in the family's own format. The library's attempts that failed are `invalid`."""
        parsed = self._renderer.parse_response(
            ids.tolist(),
            tools=[dict(tool) for tool in tools] or None,
            prompt_ids=None if prompt_ids is None else prompt_ids.tolist(),
        )
        calls: list[Call] = []
        invalid: list[dict[str, str]] = []
        for attempt in parsed.tool_calls if tools else ():
            error = arguments_error(attempt.name, attempt.arguments)
            if attempt.status != "ok" or error:
                invalid.append({"text": attempt.raw[:2000], "error": error or f"{attempt.status}".replace("_", " ")})
                continue
            arguments = attempt.arguments
            read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            calls.append(Call(attempt.name, read, attempt.id))
        return ParsedTurn(
            content=parsed.content,
            reasoning=parsed.reasoning_content,
            tool_calls=wire_calls(calls, id_prefix),
            invalid=invalid,
            closed=parsed.reasoning_complete is not False,
        )

    def difference(self, template: ChatTemplate, encode: Callable[[str], Ids]) -> str:
        """Where the family writes other ids than a template on the probes; "" if nowhere."""
        for messages, tools in PROBES:
            try:
                wanted = encode(template.apply(messages, tools, to_sample=True))
            except UserError:
                continue
            try:
                if np.array_equal(self.render(messages, tools), wanted):
                    continue
            except UserError as error:
                return str(error)
            roles = ", ".join(message["role"] for message in messages)
            return f"other ids for a conversation of {roles}{' with tools' if tools else ''}"
        return ""


class FamilyTemplate(Template):
    """What a family writes, as text: for models whose template the library is, not Jinja.

    Args:
        family: Who writes.
        tokenizer: Its tokenizer.
        kwargs, today: As given to the family.
    """

    def __init__(self, family: Family, tokenizer: Any, *, kwargs: Mapping[str, Any] | None, today: date | None) -> None:
        self.name = model_name(tokenizer)
        self.source = ""
        self.kwargs = dict(kwargs or {})
        self.today = today or date.today()
        self._family = family
        self._tokenizer = tokenizer

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], to_sample: bool) -> str:
        ids = self._family.render(messages, tools, to_sample=to_sample).tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _identity(self) -> list[Any]:
        return [*super()._identity(), self._family.facts]


def known_families() -> list[str]:
    """Names of the families that the library knows."""
    from typing import get_args

    import renderers

    variants = get_args(get_args(renderers.RendererConfig)[0])
    names = {variant.model_fields["name"].default for variant in variants}
    return sorted(names - {"auto", "default", "custom"})


def family_of(tokenizer: Any) -> str | None:
    """Name of the family that the library has for a tokenizer's model; None for a model that it does not know."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # no name of the hub; the library is slow to import
        return None
    from renderers.base import MODEL_RENDERER_MAP

    known: Mapping[str, str] = MODEL_RENDERER_MAP
    return known.get(name)


def choose_family(
    kind: str,
    tokenizer: Any,
    *,
    chat_template: str | None,
    kwargs: Mapping[str, Any] | None,
    today: date | None,
    keep_thinking: bool,
    encode: Callable[[str], Ids],
) -> tuple[Family | None, Template]:
    """The family that renders for a tokenizer (None: its Jinja template does), and the template that judges.

    Args:
        kind: `auto`: the family that the library has for the model, where it writes the template's ids. `template`:
            none. Else a family's name: that one, whatever the template says.
        tokenizer: A `transformers` tokenizer.
        chat_template: Jinja source that replaces the tokenizer's own; no family stands for it.
        kwargs: Template variables.
        today: What prompts with a date tell.
        keep_thinking: See `Family`.
        encode: Text to int32 ids, without special tokens added.

    Raises:
        UserError: An unknown kind, one that does not fit the tokenizer, or no chat template where one is needed.
    """
    name = model_name(tokenizer)

    def family(of: str) -> Family:
        return Family(of, tokenizer, kwargs=kwargs, today=today, keep_thinking=keep_thinking)

    def template() -> ChatTemplate:
        return ChatTemplate(tokenizer, source=chat_template, kwargs=kwargs, today=today)

    if kind not in ("auto", "template"):
        if chat_template is not None:
            raise UserError(f"renderer.kind {kind}: takes no chat_template of your own; use kind: template")
        chosen = family(kind)
        if not getattr(tokenizer, "chat_template", None):
            return chosen, FamilyTemplate(chosen, tokenizer, kwargs=kwargs, today=today)
        judge = template()
        difference = chosen.difference(judge, encode)
        if not difference:
            logger.info("renderer: %s, for %s", kind, name)
            return chosen, judge
        logger.warning("renderer %s differs from the chat template of %s and rules: %s", kind, name, difference)
        return chosen, FamilyTemplate(chosen, tokenizer, kwargs=kwargs, today=today)
    of = family_of(tokenizer) if kind == "auto" and chat_template is None else None
    if of is None:
        judge = template()
        why = {"auto": "the library knows no such model"}.get(kind, "kind: template")
        logger.info("renderer: the chat template of %s: %s", name, "a template of its own" if chat_template else why)
        return None, judge
    try:
        chosen = family(of)
        if not getattr(tokenizer, "chat_template", None):
            return chosen, FamilyTemplate(chosen, tokenizer, kwargs=kwargs, today=today)
        judge = template()
        difference = chosen.difference(judge, encode)
    except UserError as error:
        judge, difference = template(), str(error)
    if difference:
        logger.info("renderer: the chat template of %s, not the library's %s: %s", name, of, difference)
        return None, judge
    logger.info("renderer: the library's %s, for %s", of, name)
    return chosen, judge
