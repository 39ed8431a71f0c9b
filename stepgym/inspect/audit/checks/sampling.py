"""Checks of how tokens were sampled and what their logprobs are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.finding import Severity
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import StepView, TrajectoryView

_TOLERANCE = 1e-4
_ALIKE = 16
"""Sampled tokens that never all have one and the same logprob."""
_ERROR: Severity = "error"
_WARNING: Severity = "warning"


@check("step")
def logprob_values(view: StepView) -> Iterator[Fault]:
    """A sampled token's logprob is a finite number, 0 or less, and not the same for all tokens.

    A logprob of -inf is a warning: servers report it for tokens that are too unlikely for their numbers.
    """
    step = view.step
    if step.logprobs is None or not view.has_ids or not len(step.logprobs):
        return
    start, lowest = len(view.prompt_ids), np.isneginf(step.logprobs)
    bad = (~np.isfinite(step.logprobs) & ~lowest) | (step.logprobs > _TOLERANCE)
    for found, severity, what in ((bad, _ERROR, "no logprobs"), (lowest, _WARNING, "-inf too")):
        if found.any():
            first, more = int(found.argmax()), int(found.sum()) - 1
            yield Fault(
                f"the logprob of a sampled token is {float(step.logprobs[first]):g}"
                + (f", and {more} more are {what}" if more else ""),
                start + first,
                severity,
            )
    count, same = len(step.logprobs), float(step.logprobs[0])
    # Logprobs of exactly 0 may be the model's own: those are looked at over the whole run.
    if same and np.isfinite(same) and count >= _ALIKE and (step.logprobs == step.logprobs[0]).all():
        yield Fault(f"all {count} tokens of the response have the logprob {same:g}: none was recorded", start)


@check("run", name="logprob_values")
def _all_alike(run: Statistics) -> Iterator[Fault]:
    """Logprobs that are one and the same number in the whole run stand in for those that an engine did not give."""
    alike = run.logprobs
    if alike.tokens >= _ALIKE and alike.low == alike.high:
        yield Fault(f"all {alike.tokens} sampled tokens of the run have the logprob {alike.low:g}: none was recorded")


@check("step")
def logprobs_missing(view: StepView) -> Iterator[Fault]:
    """Steps that the policy sampled have logprobs, and steps of an expert's script have none."""
    step = view.step
    if not view.has_ids:
        return
    if step.sampler == "scripted" and step.logprobs is not None:
        yield Fault("a scripted turn has logprobs, although nothing sampled it")
    elif step.sampler == "policy" and step.logprobs is None:
        severity: Severity = "error" if view.owner.trained else "note"
        yield Fault("a turn that the policy sampled has no logprobs", severity=severity)


@check("step")
def trained_as_sampled(view: StepView) -> Iterator[Fault]:
    """Turns that are trained on were sampled from softmax(logits / T), T > 0, without truncation or penalties.

    Their logprobs are of that distribution (`processed`). An error in a training phase, unless the recipe has its
    correction switched off, which makes it a warning.
    """
    step = view.step
    if not view.owner.trained or step.sampler != "policy" or not view.has_ids:
        return
    severity = _severity(view.owner)
    sampling = step.sampling
    if sampling is None:
        yield Fault("it is not recorded how the turn was sampled", severity=severity)
        return
    wrong = []
    if sampling.temperature <= 0:
        wrong.append(f"temperature {sampling.temperature:g}")
    wrong += [f"{name} {value:g}" for name, (value, _) in sampling.departures().items()]
    if wrong:
        yield Fault(f"the turn was sampled with {', '.join(wrong)}: its logprobs do not say how likely it was",
                    severity=severity)  # fmt: skip
    if sampling.logprobs_kind != "processed":
        yield Fault(f"the kind of the logprobs is {sampling.logprobs_kind!r}, not 'processed'", severity=severity)


@check("trajectory")
def sampling_changes(view: TrajectoryView) -> Iterator[Fault]:
    """All turns of a trajectory were sampled in one way, by one kind of sampler."""
    first = next((each.step for each in view.steps if each.step.sampling is not None), None)
    if first is None:
        return
    for each in view.steps:
        step = each.step
        if step.sampler != first.sampler:
            yield Fault(f"the turn is {step.sampler}, others are {first.sampler}", severity="warning", step=each.index)
            return
        if step.sampling is not None and step.sampling != first.sampling:
            names = [n for n in step.sampling.__dataclass_fields__
                     if getattr(step.sampling, n) != getattr(first.sampling, n)]  # fmt: skip
            yield Fault(
                f"the turn was sampled otherwise than the first one ({', '.join(names)})",
                severity="warning",
                step=each.index,
            )
            return


def _severity(view: TrajectoryView) -> Severity:
    correction = view.facts.section("algorithm").get("correction")
    kind = correction.get("kind") if isinstance(correction, dict) else correction
    return "warning" if kind == "none" else "error"
