"""How a recorded prompt differs from what is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np

from stepgym.errors import UserError
from stepgym.inspect.audit.reading import ended
from stepgym.inspect.audit.rendering import Rendering
from stepgym.inspect.audit.views import StepView
from stepgym.model.renderer import Turn
from stepgym.record.delta import common_prefix
from stepgym.record.step import Ids

Kind = Literal["tokenisation", "beyond", "other text", "history rewritten"]


class Difference(NamedTuple):
    """Where a prompt differs, and how.

    Attributes:
        kind: `tokenisation` (the same text in other ids), `beyond` (the text and more), `other text`, or
            `history rewritten` (extended although the template rewrites history).
        token: Position of the first token that differs.
        wanted: The text that is rendered.
        found: The text that the prompt holds.
    """

    kind: Kind
    token: int
    wanted: str
    found: str


def compare(text: str, ids: Ids, rendering: Rendering, start: int) -> Difference | None:
    """Compares ids, which begin at position `start` of a prompt, with those of a text."""
    wanted = rendering.ids(text, keep=start == 0)
    if len(wanted) == len(ids) and (wanted == ids).all():
        return None
    at = common_prefix(wanted, ids)
    token = start + min(at, max(0, len(ids) - 1))
    found = rendering.decode(ids)
    if found == text:
        return Difference("tokenisation", token, text, found)
    if found.startswith(text):
        return Difference("beyond", token, "", found[len(text) :])
    return Difference("other text", token, text, found)


def expected_addition(
    view: StepView, *, tools: Sequence[Mapping[str, Any]] | None = None, strict: bool = False
) -> str | None:
    """What the template writes after the turn that this step follows; None where it writes that turn otherwise.

    With `strict` the turn's text alone is looked for, as it was sampled. Raises `UserError` as the template does.
    """
    parent, rendering = view.parent, view.rendering
    assert parent is not None
    if parent.messages is None or view.messages is None or parent.step.message is None or not parent.has_ids:
        return None
    if tools is None or tools is view.tools:
        before, text = parent.template_text, view.template_text
    else:
        before, text = rendering.text(parent.messages, tools), rendering.text(view.messages, tools)
    if not text.startswith(before):
        return None
    said = parent.step.message
    turns = [parent.spoken[: parent.stopped_at]]
    if not strict:
        turns += [str(said.get("text") or ""), str(said.get("content") or "")]
    for turn in turns:
        stop = len(before) + len(turn)
        if not text.startswith(turn, len(before)):
            continue
        for end in rendering.ends:
            if text.startswith(end, stop):
                return text[stop + len(end) if ended(parent) else stop :]
    return None


def as_rendered(view: StepView) -> bool:
    """Whether the renderer, told how the conversation went, gives the very ids of the prompt.

    Asked where the template's text cannot tell: for turns that stay although the template would rewrite them, and for
    families of the `renderers` library, whose ids need not be those of their text. Raises `UserError` as it does.
    """
    renderer, parent, messages = view.rendering.renderer, view.parent, view.messages
    if messages is None:
        return False
    previous = None
    if view.extends and parent is not None and parent.messages is not None and parent.step.message is not None:
        before = parent.template_text
        previous = Turn(
            messages=parent.messages,
            prompt_text=before,
            message=dict(parent.step.message),
            ended=ended(parent),
            truncated=parent.step.status == "truncated",
            tools=view.tools,
            opener=renderer.opener(before),
            appended=parent.step.rendering == "appended",
            prompt_ids=parent.prompt_ids,
            response_ids=parent.response_ids,
        )
    prompt = view.rendering.prompt(messages, view.tools, previous)
    start = view.shared if prompt.extends else 0
    return bool(np.array_equal(view.prompt_ids[start:], prompt.new_ids))


def other_date(view: StepView) -> date | None:
    """The date under which the prompt is what the template renders, where that is not the recorded one.

    Tried are the days around the recorded date and the day on which the episode began.
    """
    rendering, messages = view.rendering, view.messages
    recorded = rendering.renderer.template.today
    began = datetime.fromtimestamp(view.trajectory.started_at, UTC).date()
    days = [day + timedelta(days=off) for day in (began, recorded) for off in (0, 1, -1)]
    if "strftime_now" not in rendering.renderer.template.source:
        return None
    own = rendering.decode(view.prompt_ids)
    for day in dict.fromkeys(days):
        if day == recorded:
            continue
        try:
            if rendering.at(day).text(messages or (), view.tools) == own:
                return day
        except UserError:
            continue
    return None
