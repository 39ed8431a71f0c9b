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
        renderer = view.rendering.renderer
        opener = renderer.opener(view.rendering.decode(view.prompt_ids[-_TAIL:])) if renderer.reasoning else ""
        view.reading = renderer.read(
            view.response_ids, stop=tuple(view.step.stop), tools=view.tools, id_prefix="call", opener=opener
        )
    return view.reading
