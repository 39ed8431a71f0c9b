"""Checks of what was sampled: masks, ends of turns, what a response may not hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import StepView

RARE = 1e-3
"""Logprobs that are exactly zero are rare in a run where fewer than this share of its sampled tokens have one."""
OFTEN = 0.1
"""Rows of such tokens are the model's own way where more than this share of the turns has one."""


@check("step")
def unsampled_token_trained(view: StepView) -> Iterator[Fault]:
    """No token that the engine did not return as generated has a non-zero loss mask (promise 3).

    Shown by data: a mask that is not 0 or 1, trained tokens beyond those that were asked for, trained tokens without
    weights that sampled them, and steps of an abandoned request.
    """
    step = view.step
    if not view.has_ids or step.loss_mask is None:
        return
    start = len(view.prompt_ids)
    odd = np.flatnonzero((step.loss_mask != 0) & (step.loss_mask != 1))
    if len(odd):
        yield Fault(f"the loss mask is {int(step.loss_mask[odd[0]])}, which is neither 0 nor 1", start + int(odd[0]))
    if step.weights_versions and step.sampler == "policy":
        covered = np.zeros(len(step.loss_mask), dtype=bool)
        for _, begin, end in step.weights_versions:
            covered[max(0, begin) : max(0, end)] = True
        bare = np.flatnonzero((step.loss_mask == 1) & ~covered)
        if len(bare):
            yield Fault(
                f"{len(bare)} tokens are trained on, but no weights are recorded as having sampled them",
                start + int(bare[0]),
            )


@check("step")
def sampled_token_untrained(view: StepView) -> Iterator[Fault]:
    """Every token that the engine returned as generated has a loss mask of 1, so that it is trained on.

    Of a turn's end `end_of_turn_untrained` speaks.
    """
    mask = view.step.loss_mask
    if not view.has_ids or mask is None or view.step.sampler != "policy":
        return
    if view.owner.rendering is None or view.ended_by is not None:
        mask = mask[:-1]
    masked = np.flatnonzero(mask == 0)
    if len(masked):
        yield Fault(
            f"{len(masked)} of {len(view.response_ids)} sampled tokens are not trained on",
            len(view.prompt_ids) + int(masked[0]),
            severity="warning",
        )


@check("step")
def empty_response(view: StepView) -> Iterator[Fault]:
    """Every response has at least one token; a reward on an empty one teaches nothing."""
    if view.has_ids and not len(view.response_ids):
        yield Fault("the response has no tokens", len(view.prompt_ids) or None, severity="warning")


@check("run", name="unsampled_token_trained")
def _free_tokens(run: Statistics) -> Iterator[Fault]:
    """Padded tokens carry a logprob of exactly 0, many in a row; tokens that were sampled hardly ever do."""
    free, steps = run.ends.free_rows, run.ends.steps
    if not free or (len(free) > 2 and len(free) > OFTEN * steps):
        return
    for each in free:
        yield Fault(
            f"{each.size} trained tokens in a row have logprob exactly 0, as in {len(free) / steps:.1%} of the turns: "
            "they were put there, not sampled",
            each.token,
            severity="warning",
            step=each.step,
            trajectory=each.trajectory,
            context=each.context,
        )


@check("run")
def appended_end_of_turn(run: Statistics) -> Iterator[Fault]:
    """A turn's end that was not sampled is not in the response; it belongs to the next prompt.

    It shows in a logprob of exactly 0 where next to no other token has one; with a tokenizer also in that it follows a
    stop string, or more tokens than were asked for.
    """
    ends = run.ends
    if not ends.free:
        return
    elsewhere = ends.free_others / ends.others if ends.others else 0.0
    every = ends.trained >= 20 and len(ends.free) >= 0.95 * ends.trained and elsewhere < 0.5
    if elsewhere >= RARE and not every:
        return
    for each in ends.free:
        yield Fault(
            f"the end of the turn has logprob exactly 0, as {elsewhere:.2%} of the other tokens have: "
            "it was appended, not sampled",
            each.token,
            severity="error" if elsewhere < RARE else "warning",
            step=each.step,
            trajectory=each.trajectory,
            context=each.context,
        )


@check("step", name="appended_end_of_turn", needs="tokenizer")
def _end_after_the_end(view: StepView) -> Iterator[Fault]:
    step = view.step
    if not view.has_ids or view.ended_by is None or step.sampler != "policy":
        return
    at = step.length - 1
    if view.end_is_one_too_many:
        yield Fault(
            f"the end of the turn is token {len(view.response_ids)} of a response that was asked for "
            f"{view.asked} at most: it was appended",
            at,
        )
    elif view.stopped_at == len(view.spoken) and view.spoken:
        yield Fault("the end of the turn stands after a stop string that had ended the response: it was appended", at)


@check("run", needs="tokenizer")
def end_of_turn_untrained(run: Statistics) -> Iterator[Fault]:
    """Ends of turns that were sampled are trained on, else the model forgets how to stop."""
    ends = run.ends
    if ends.masked and not ends.trained:
        yield Fault(
            f"none of the {ends.masked} ends of turns is trained on: the model will not learn to stop",
            severity="warning",
        )


@check("step", name="end_of_turn_untrained", needs="tokenizer")
def _masked_end_of_turn(view: StepView) -> Iterator[Fault]:
    if view.has_ids and view.ended_by is not None and view.step.loss_mask is not None and not view.step.loss_mask[-1]:
        yield Fault("the end of the turn is in the response but is not trained on", view.step.length - 1, "note")
