"""What the audit asks of a renderer: a conversation's text and ids, for the date of the trajectory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any

from stepgym.errors import UserError
from stepgym.model.renderer import Prompt, Renderer, Turn
from stepgym.model.renderer_files import redated
from stepgym.record.step import Ids

_log = logging.getLogger(__name__)
_KEPT = 512


class Rendering:
    """A renderer under one frozen date, with what was rendered lately kept.

    Args:
        renderer: The run's renderer.

    Attributes:
        stop_ids: Ids that end a response.
        ends: What ends a turn, as text.
        special: Texts of the tokenizer's special tokens, by id: those with a part to play (end of text, say), and all
            that it marks as special (as those around a role's name).
        own_template: Whether the chat template renders, not a family of the `renderers` library.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.stop_ids = frozenset(renderer.stop_token_ids)
        self.ends = tuple(text for i in renderer.stop_token_ids if (text := renderer.decode([i])).strip())
        tokenizer: Any = renderer.tokenizer
        self.special: dict[int, str] = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.special.update((i, str(token)) for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special.update((i, renderer.decode([i])) for i in self.stop_ids)
        self.own_template = renderer.kind == "template"
        self._ids: dict[str, Ids] = {}

    @property
    def digest(self) -> str:
        """Digest of the template, its variables and its date, as provenance has it."""
        return self.renderer.template.digest

    def at(self, day: date) -> Rendering:
        """The same under another date."""
        return Rendering(redated(self.renderer, day))

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """What is rendered for a conversation that the model shall go on with, from scratch.

        Raises `UserError` where the template refuses it.
        """
        with _one_line():
            return self.renderer.template.apply(messages, tools, to_sample=True)

    def ids(self, text: str, *, keep: bool = False) -> Ids:
        """int32 ids of a text. `keep` those of a text that comes again, as the first prompt of a group does."""
        known = self._ids.get(text)
        if known is not None:
            return known
        with _one_line():
            ids = self.renderer.encode(text)
        return self._keep(text, ids) if keep else ids

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens shown."""
        return self.renderer.decode(ids)

    def generation_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """What the template adds for sampling; empty for templates that have none of their own."""
        with _one_line():
            return self.renderer.generation_prompt(messages, tools)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], previous: Turn | None
    ) -> Prompt:
        """The renderer's own prompt, given the turn before. Raises `UserError` where it cannot be."""
        with _one_line():
            return self.renderer.prompt(messages, tools, previous)

    def _keep(self, text: str, ids: Ids) -> Ids:
        if len(self._ids) >= _KEPT:
            self._ids.pop(next(iter(self._ids)))
        self._ids[text] = ids
        return ids


@contextmanager
def _one_line() -> Iterator[None]:
    """Makes a `UserError` of what templates and tokenizers raise for messages that are none (no content, half a
    character).
    """
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(" ".join(f"{type(error).__name__}: {error}".split())) from None


class Renderings:
    """The run's renderer under every date that its trajectories were made with.

    Args:
        renderer: The run's renderer; None where there is none to be had.
    """

    def __init__(self, renderer: Renderer | None) -> None:
        self._by_date: dict[str, Rendering] = {}
        self.first = Rendering(renderer) if renderer is not None else None
        if self.first is not None and renderer is not None:
            self._by_date[renderer.template.today.isoformat()] = self.first

    def of(self, provenance: Mapping[str, Any]) -> Rendering | None:
        """The rendering for a trajectory, under the date that it recorded."""
        recorded = provenance.get("template_date")
        if self.first is None or not isinstance(recorded, str):
            return self.first
        if recorded not in self._by_date:
            try:
                self._by_date[recorded] = self.first.at(date.fromisoformat(recorded))
            except (ValueError, UserError) as error:
                _log.warning("the template's date %r cannot be used: %s", recorded, error)
                self._by_date[recorded] = self.first
        return self._by_date[recorded]
