"""Reasoning in the text of a turn: which tags a model thinks between, and what stands outside of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepgym.errors import UserError
from stepgym.model.template import Template

_THOUGHT, _CONTENT = "stepgym-thought-9c1e", "stepgym-content-4b7d"
_USER = {"role": "user", "content": "x"}
_TAGS_AROUND = re.compile(rf"(?P<open><[\w:]+>|\[\w+\])\s*{_THOUGHT}\s*(?P<close></[\w:]+>|\[/\w+\])")


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags that a model thinks between."""

    open: str
    close: str

    def opener(self, prompt: str) -> str:
        """The end of a prompt that leaves reasoning open, with the white space after it; "" where none is open."""
        tail = prompt[-64:]
        bare = tail.rstrip()
        return tail[len(bare) - len(self.open) :] if bare.endswith(self.open) else ""


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A turn's text, its reasoning split off.

    Attributes:
        reasoning: Text between the tags at the turn's start; None without reasoning.
        start: Where the rest of the turn's text begins.
        closed: Whether the reasoning ends. Where it does not there is no rest.
    """

    reasoning: str | None
    start: int
    closed: bool


KNOWN = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


def find_reasoning(template: Template) -> ReasoningTags | None:
    """The tags that a template writes around `reasoning_content`, or that its generation prompt opens.

    None for a template that knows no reasoning: what looks like tags of reasoning is content then.
    """
    try:
        thought = {"role": "assistant", "content": _CONTENT, "reasoning_content": _THOUGHT}
        shown = _TAGS_AROUND.search(template.apply([_USER, thought], to_sample=False))
        opened = template.apply([_USER], to_sample=True).rstrip()
    except UserError:
        return None
    if shown:
        tags = ReasoningTags(shown["open"], shown["close"])
        if tags.close == tags.open[0] + "/" + tags.open[1:]:
            return tags
    for tags in KNOWN:
        if opened.endswith(tags.open):
            return tags
    return KNOWN[0] if "reasoning_content" in template.source else None


def split_reasoning(text: str, shadow: str, tags: ReasoningTags) -> Reasoned:
    """Split off the reasoning that a turn starts with.

    Args:
        text: The turn, with the opener that its prompt ended in.
        shadow: The same text where what only spells a tag is blotted out (see `Delimiters`).
        tags: The model's tags.
    """
    head = len(shadow) - len(shadow.lstrip())
    if not shadow.startswith(tags.open, head):
        return Reasoned(None, 0, True)
    begin = head + len(tags.open)
    end = shadow.find(tags.close, begin)
    if end < 0:
        return Reasoned(text[begin:].strip("\n"), len(text), False)
    start = end + len(tags.close)
    rest = text[start:]
    return Reasoned(text[begin:end].strip("\n"), start + len(rest) - len(rest.lstrip("\n")), True)
