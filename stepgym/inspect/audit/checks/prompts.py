"""Checks of prompts: that they end where sampling begins, and that they are what the template renders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepgym.errors import UserError
from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.context import snippet
from stepgym.inspect.audit.drift import Difference, as_rendered, compare, expected_addition, other_date
from stepgym.inspect.audit.finding import Severity
from stepgym.inspect.audit.open_turn import prompt_faults, turn_faults
from stepgym.inspect.audit.reading import ended
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import StepView
from stepgym.inspect.main_line import PLAIN_LOOP

EXTENDING = ("extended", "appended")
ANEW = ("template_rewrote_history", "thinking_stripped", "truncated_turn", "tools_changed")
REASONS = (*ANEW, "agent_rewrote_history", "turn_closed")
"""Why a prompt may have been rendered anew (see `Step.rendering`)."""


@check("step")
def follows(view: StepView) -> Iterator[Fault]:
    """A step follows an earlier step of its trajectory, and what it says about its prompt agrees with that."""
    step = view.step
    if step.follows is not None and view.parent is None:
        yield Fault(f"it follows step {step.follows}, which does not stand before it")
    elif step.follows is None and (step.rendering in EXTENDING or view.in_open_turn):
        yield Fault(f"its prompt is said to be {step.rendering!r}, but it follows no step")
    elif view.parent is not None and step.rendering == "first":
        yield Fault(f"its prompt is said to be a conversation's first, but it follows step {step.follows}")
    turns = view.trajectory.provenance.get("turns")
    of_one_turn = view.in_open_turn or step.rendering == "turn_closed"
    of_messages = step.rendering in (*EXTENDING, *ANEW)
    if (turns == "continue" and of_messages) or (turns == "conversation" and of_one_turn):
        yield Fault(f"its prompt is said to be {step.rendering!r}, which no prompt is under the run's turns: {turns}")
    roles = {str(message.get("role")) for message in step.new_messages}
    if step.rendering == "turn_closed" and (step.follows is None or roles <= {"user"}):
        yield Fault("its prompt is said to be 'turn_closed', but no message ended an open turn")
    if step.rendering == "agent_rewrote_history" and "assistant" not in roles:
        yield Fault("its prompt is said to be 'agent_rewrote_history', but the agent added no turn of an assistant")
    if view.parent is not None and view.parent.step.message is None:
        yield Fault(f"it follows step {step.follows}, whose message is not recorded", severity="warning")


@check("step")
def not_extended(view: StepView) -> Iterator[Fault]:
    """A prompt begins with the very ids that were sampled before it, or says why it does not (promises 1 and 6).

    With a tokenizer the finding says whether the text is the same: then the history was tokenised again.
    """
    step = view.step
    if not view.has_ids or view.parent is None or not view.parent.has_ids or view.extends:
        return
    if step.rendering in REASONS or step.rendering == "first":
        return  # of a conversation's first prompt `follows` says so
    if view.in_open_turn and view.shared >= view.kept:
        return
    said = f"the prompt is said to be {step.rendering!r}" if step.rendering else "no reason is given for it"
    where = "prompt" if view.shared < len(view.parent.prompt_ids) else "response"
    text = f"{said}, but the prompt leaves the {where} of step {step.follows} after {view.shared} of {view.kept} tokens"
    if view.owner.rendering is not None:
        rendering = view.rendering
        own = rendering.decode(view.prompt_ids)
        if own.startswith(rendering.decode(view.parent.full_ids[: view.kept])):
            text += ": its text is the same, only the tokenisation is wrong"
        else:
            text += ": its text is another one"
    severity: Severity = "error" if step.rendering in EXTENDING or view.in_open_turn else "warning"
    yield Fault(text, min(view.shared, step.length - 1), severity)


@check("step", needs="tokenizer")
def generation_prompt(view: StepView) -> Iterator[Fault]:
    """A prompt to sample from ends with the template's generation prompt, or in an open assistant turn (promise 2)."""
    if view.has_ids and view.in_open_turn:
        yield from turn_faults(view)
        return
    wanted = view.generation_prompt
    if not view.has_ids or not wanted:
        return
    ids = view.rendering.ids(wanted, keep=True)
    prompt = view.prompt_ids
    if len(prompt) >= len(ids) and (prompt[len(prompt) - len(ids) :] == ids).all():
        return
    tail = view.rendering.decode(prompt[-len(ids) - 8 :]) if len(prompt) else ""
    if not tail.endswith(wanted):
        yield Fault(
            f"the prompt ends in {tail[-40:]!r}, not in the generation prompt {wanted!r}", max(0, len(prompt) - 1)
        )


@check("step", needs="tokenizer")
def response_start(view: StepView) -> Iterator[Fault]:
    """A response begins where the prompt ends: it repeats no generation prompt, and none of it is in the prompt."""
    wanted = view.generation_prompt
    if not view.has_ids or not wanted:
        return
    ids = view.rendering.ids(wanted, keep=True)
    if len(ids) > 1 and len(view.response_ids) >= len(ids) and (view.response_ids[: len(ids)] == ids).all():
        yield Fault(f"the response begins with the generation prompt {wanted!r}", len(view.prompt_ids))


@check("step", needs="tokenizer")
def prompt_drift(view: StepView) -> Iterator[Fault]:
    """A prompt is what the template renders, tokenised as the tokenizer does (promise 1).

    Where history was rendered anew, the record says why; where it was extended, only what is new is compared, which in
    an open turn is the observation. A difference is classified: wrong tokenisation of the same text, another date,
    another template, or another text.
    """
    if not view.has_ids:
        return
    step = view.step
    if step.rendering in EXTENDING and view.parent is not None and not view.extends:
        return  # `not_extended` says so
    if view.in_open_turn:
        yield from prompt_faults(view)
        return
    if view.messages is None:
        if step.follows is None:
            yield Fault("no messages are recorded that the prompt was made of", severity="warning")
        return
    try:
        difference = _difference(view, view.tools)
        if difference is not None and view.tools and _difference(view, ()) is None:
            if view.trajectory.provenance.get("agent", PLAIN_LOOP) == PLAIN_LOOP and not view.owner.tools_changed:
                yield Fault("the prompt shows none of the tools on offer", difference.token)
                return
            difference = None  # an agent's call without the tools
        asked = step.rendering == "appended" or not view.rendering.own_template
        if difference is not None and asked and as_rendered(view):
            difference = None
    except UserError as error:
        yield Fault(f"the prompt cannot have been rendered: {error}")
        return
    if difference is not None:
        if view.owner.tools_changed:
            text = "tools changed in the conversation, and which ones were on offer is not recorded: not checked"
            yield Fault(text, difference.token, severity="note")
            return
        yield Fault(_say(view, difference), difference.token)
        return
    if (
        step.rendering in ("template_rewrote_history", "thinking_stripped")
        and view.parent is not None
        and not view.extends
        and view.rendering.own_template
        and expected_addition(view, strict=True) is not None
    ):
        yield Fault(
            f"the prompt was rendered anew ({step.rendering}), but the template leaves history as it was sampled",
            min(view.shared, len(view.prompt_ids) - 1),
            severity="warning",
        )


@check("run", needs="tokenizer")
def template_differs(run: Statistics) -> Iterator[Fault]:
    """The run was made with one chat template, and it is the one that the audit renders with."""
    ours, theirs = run.template, run.templates
    undated = {digest for digest, _ in theirs}
    if len(theirs) > 1 and len({day for _, day in theirs}) == 1 and len(undated) > 1:
        yield Fault(f"the trajectories were made with {len(undated)} templates", severity="warning")
    strange = sum(count for count in run.strange_templates.values())
    if ours and strange:
        yield Fault(
            f"{strange} trajectories were made with another template or other template variables than the audit has "
            f"({', '.join(sorted(run.strange_templates))}; here {ours})",
            severity="warning",
        )


def _difference(view: StepView, tools: Sequence[Mapping[str, Any]]) -> Difference | None:
    """How the prompt differs from what is rendered; None where it does not."""
    rendering = view.rendering
    if view.extends and view.step.rendering not in REASONS:
        start = view.shared
        wanted = expected_addition(view, tools=tools)
        if wanted is not None:
            return compare(wanted, view.prompt_ids[start:], rendering, start)
        return compare_suffix(view, tools)
    text = view.template_text if tools is view.tools else rendering.text(view.messages or (), tools)
    return compare(text, view.prompt_ids, rendering, 0)


def compare_suffix(view: StepView, tools: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Compares what was added with the end of what the template renders, where the sampled turn reads otherwise.

    The addition has to be the end of the template's text, tokenised as it is, and has to hold every new message; and
    where nothing else is said the template must not have rewritten what came before.
    """
    rendering, start = view.rendering, view.shared
    added = view.prompt_ids[start:]
    text = view.template_text if tools is view.tools else rendering.text(view.messages or (), tools)
    own = rendering.decode(added)
    end = own
    parent = view.parent
    assert parent is not None
    if not ended(parent):
        end = own.removeprefix(next((text for text in rendering.ends if own.startswith(text)), ""))
    missing = [m for m in view.step.new_messages if str(m.get("content") or "").strip() not in own]
    if not text.endswith(end) or missing:
        wanted = text[max(0, len(text) - len(own)) :]
        return Difference("other text", start, wanted, own)
    if (found := compare(own, added, rendering, start)) is not None:
        return found
    if view.step.rendering == "extended" and rendering.own_template:
        before = parent.template_text if tools is view.tools else rendering.text(parent.messages or (), tools)
        opener = rendering.generation_prompt(parent.messages or (), tools)
        if not text.startswith(before.removesuffix(opener)):
            at = _agreeing(text, before)
            return Difference("history rewritten", start, text[at:], before[at:])
    return None


def _agreeing(left: str, right: str) -> int:
    """Number of leading characters that two texts share."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in same)


def _say(view: StepView, difference: Difference) -> str:
    kind = difference.kind
    recorded = view.trajectory.provenance.get("template")
    if kind == "tokenisation":
        return "the prompt has the template's text, but not the tokenizer's ids for it: only the tokenisation is wrong"
    if kind == "beyond":
        return f"the prompt goes on after the template's text ends, with {snippet(difference.found, 0)}"
    if kind == "history rewritten":
        return (
            "the prompt is said to be 'extended', but the template rewrites what came before: it writes "
            f"{snippet(difference.wanted, 0)} where {snippet(difference.found, 0)} stood"
        )
    at = _agreeing(difference.wanted, difference.found)
    what = f"{snippet(difference.found, at)} stands where {snippet(difference.wanted, at)} is rendered"
    day = other_date(view)
    if day is not None:
        return f"the prompt was rendered under another date ({day.isoformat()}): {what}"
    if isinstance(recorded, str) and recorded != view.rendering.digest:
        return f"the prompt was rendered by another template, or with other variables: {what}"
    return f"the prompt has another text than the template renders: {what}"
