"""Checks of observations: they stand in prompts, never in responses, and hold no control tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stepgym.errors import UserError
from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.context import snippet
from stepgym.inspect.audit.views import StepView

_LONG_ENOUGH = 4
"""An observation is looked for in a response if it has this many characters; fewer may stand anywhere."""


@check("step", needs="tokenizer")
def observation_in_response(view: StepView) -> Iterator[Fault]:
    """A response holds no observation token: nothing stands after the turn's end or a stop string
    (promise 5).

    What a single token brings along beyond a stop string stays; a whole token after it does not.
    """
    if not view.has_ids or view.step.sampler == "scripted" or len(view.response_ids) < 2:
        return
    ids, start = view.response_ids, len(view.prompt_ids)
    rendering = view.rendering
    stops = np.flatnonzero(np.isin(ids[:-1], list(rendering.stop_ids)))
    at, what = (int(stops[0]) + 1, "end of the turn") if len(stops) else (len(ids), "")
    body = ids[:-1] if view.ended_by is not None else ids
    if view.stopped_at is not None and view.stopped_at < len(view.spoken):
        stopped = _tokens_up_to(view, body, view.stopped_at)
        if stopped < min(at, len(body)):
            at, what = stopped, "stop string that ends the turn"
    if what:
        after = rendering.decode(ids[at:])
        yield Fault(
            f"{len(ids) - at} tokens stand after the {what}{_whose(view, after)}: {snippet(after, 0)}", start + at
        )


@check("step", needs="tokenizer")
def special_token_in_observation(view: StepView) -> Iterator[Fault]:
    """No text of an observation is a special token's, which would be tokenised into control: a forged turn, say."""
    if not view.has_ids or view.messages is None:
        return
    special = view.rendering.special
    for message in view.step.new_messages:
        if message.get("role") == "assistant":
            continue
        content = str(message.get("content") or "")
        if not _may_hold(content, special):
            continue
        held = ((text, _where(view, content, i, text)) for i, text in special.items() if text and text in content)
        # Of a text in an open turn only what stands there counts: the rest was cut off.
        token = next(((text, at) for text, at in held if at is not None or not view.in_open_turn), None)
        if token is not None:
            yield Fault(
                f"a {message.get('role', '')} message holds the text {token[0]!r}, which is a special token",
                token[1],
                severity="warning",
            )


def _may_hold(content: str, special: Mapping[int, str]) -> bool:
    return any(text in content for text in special.values() if text)


def _where(view: StepView, content: str, token: int, text: str) -> int | None:
    """Where in the prompt the special token of a message stands; None where it became no such token."""
    rendering, start = view.rendering, view.kept if view.in_open_turn else view.shared
    added = view.prompt_ids[start:]
    if view.in_open_turn:  # no template has put tokens of its own there
        places = np.flatnonzero(added == token)
        return start + int(places[0]) if len(places) else None
    try:
        whole = view.template_text
    except UserError:
        return None
    # The tokens of that id come in the order of their texts; those before the message are the template's own.
    own = rendering.decode(added)
    tail = own if whole.endswith(own) else whole
    at = tail.find(content)
    places = np.flatnonzero(added == token)
    number = tail[: at + content.find(text)].count(text) if at >= 0 else 0
    return start + int(places[number]) if number < len(places) else None


def _tokens_up_to(view: StepView, ids: np.ndarray[tuple[int], np.dtype[np.int32]], length: int) -> int:
    """How many tokens it takes until their text has `length` characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(view.rendering.decode(ids[:middle])) < length:
            low = middle + 1
        else:
            high = middle
    return low


def _whose(view: StepView, text: str) -> str:
    """Says so where the text is the observation that the next step was given."""
    for index in view.owner.followed[view.index]:
        for message in view.owner.steps[index].step.new_messages:
            content = str(message.get("content") or "").strip()
            if len(content) >= _LONG_ENOUGH and content in text:
                return f", among them the observation of step {index}"
    return ""
