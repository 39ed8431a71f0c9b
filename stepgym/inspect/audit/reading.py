"""A response, read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepgym.inspect.audit.views import StepView

_TAIL = 64
"""Tokens at the end of a prompt in which reasoning that it leaves open is looked for."""


def read_again(view: StepView) -> Mapping[str, Any]:
    """The message that a step's response stands for, parsed afresh as the session did."""
    return reading(view)[0]


def ended(view: StepView) -> bool:
    """Whether a step's response ends in what ends a turn, so that the next prompt does not write it again."""
    return reading(view)[1]


def reading(view: StepView) -> tuple[Mapping[str, Any], bool]:
    """The message, and whether the response ends in a turn's terminator. Kept with the view."""
    if view.reading is None:
        opener, reasoning_open = begins(view)
        view.reading = view.rendering.renderer.read(
            view.response_ids,
            stop=tuple(view.step.stop),
            tools=view.tools,
            id_prefix="call",
            opener=opener,
            reasoning_open=reasoning_open,
        )
    return view.reading


def begins(view: StepView) -> tuple[str, bool]:
    """What the prompt ends in that leaves reasoning open, and whether the response begins inside reasoning.

    In an open turn the model's own earlier responses tell, back to the prompt that opened it. Kept with the view.
    """
    renderer = view.rendering.renderer
    if renderer.reasoning is None:
        return "", False
    waiting = [view]
    while (parent := _goes_on_from(waiting[-1])) is not None and parent.begins is None:
        waiting.append(parent)
    for each in reversed(waiting):
        if each.begins is not None:
            continue
        before = _goes_on_from(each)
        if before is None or before.begins is None:
            opener = renderer.opener(view.rendering.decode(each.prompt_ids[-_TAIL:])) if not each.in_open_turn else ""
            each.begins = opener, bool(opener)
            continue
        opener, is_open = before.begins
        message, _ = reading(before)
        left = renderer.leaves_reasoning_open(message, before.response_ids, opener=opener, reasoning_open=is_open)
        each.begins = "", left
    assert view.begins is not None
    return view.begins


def _goes_on_from(view: StepView) -> StepView | None:
    """The step whose turn the prompt goes on inside; None where it goes on inside none."""
    parent = view.parent if view.in_open_turn else None
    return parent if parent is not None and parent.has_ids else None
