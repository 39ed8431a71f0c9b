"""A response, read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepgym.inspect.audit.views import StepView


def read_again(view: StepView) -> Mapping[str, Any]:
    """The message that a step's response stands for, parsed afresh as the session did. Kept with the view."""
    known: Mapping[str, Any] | None = view.reading
    if known is None:
        message, _ = view.rendering.renderer.read(
            view.response_ids, stop=tuple(view.step.stop), tools=view.tools, id_prefix="call"
        )
        known = view.reading = message
    return known
