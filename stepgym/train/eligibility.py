"""Which records a policy gradient may learn from: refused in one line that says which record, and why."""

from __future__ import annotations

from collections.abc import Iterable

from stepgym.errors import UserError
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory


def require_trainable(trajectories: Iterable[Trajectory], *, correction: bool) -> None:
    """Refuse trajectories whose steps do not say how their tokens were sampled.

    Always refused: scripted steps (they are not samples of the policy; `sft` learns from them), steps without token
    ids, and greedy decoding (at temperature 0 no log-probability exists). Unless correction is off also: absent
    logprobs, logprobs of another kind than `processed`, truncated sampling (top-p, top-k, min-p) and penalties, for
    then the sampler's logprobs are not those of the distribution that was sampled from, or not comparable.

    Args:
        trajectories: What would be trained on.
        correction: Whether the importance correction between sampler and trainer is on.

    Raises:
        UserError: The first step that is refused.
    """
    for trajectory in trajectories:
        for index, step in enumerate(trajectory.steps):
            reason = _always_refused(step) or (_refused_for_correction(step) if correction else None)
            if reason:
                raise UserError(f"trajectory {trajectory.id}, step {index} cannot be trained on: {reason}")


def require_trainable_sampling(sampling: Sampling, *, correction: bool) -> None:
    """Refuse settings whose samples `require_trainable` would refuse, before anything is sampled.

    Raises:
        UserError: Names the setting and the value that it must have.
    """
    if sampling.temperature <= 0:
        raise UserError(f"sampling.temperature: training cannot use greedy decoding, {_GREEDY}")
    reason = _truncates(sampling) if correction else None
    if reason:
        raise UserError(f"sampling: training cannot use {reason}")


def _always_refused(step: Step) -> str | None:
    if step.prompt_ids is None:
        return "it has no token ids (its engine speaks only chat)"
    if step.sampler == "scripted":
        return "it is scripted, not sampled from the policy; use sft to learn from it"
    if step.sampling is not None and step.sampling.temperature <= 0:
        return f"it was decoded greedily (temperature 0), {_GREEDY}"
    return None


def _refused_for_correction(step: Step) -> str | None:
    sampling = step.sampling
    if step.logprobs is None:
        return f"it has no logprobs; use an engine that returns them, {_WAY_OUT}"
    if sampling is None:
        return f"it does not say how it was sampled, so its logprobs are of unknown kind; record `sampling`, {_WAY_OUT}"
    if sampling.logprobs_kind != "processed":
        return f"its logprobs are of kind {sampling.logprobs_kind!r}, not 'processed'; change the engine, {_WAY_OUT}"
    reason = _truncates(sampling)
    return f"it was sampled with {reason}" if reason else None


def _truncates(sampling: Sampling) -> str | None:
    for name, (value, neutral) in sampling.departures().items():
        return f"{name} = {value}, which the logprobs leave out; use {neutral}, {_WAY_OUT}"
    return None


_GREEDY = "where no log-probability exists; sample with temperature > 0"
_WAY_OUT = "or set correction to none"
