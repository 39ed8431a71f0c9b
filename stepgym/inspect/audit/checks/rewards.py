"""Checks of rewards: that they add up, lie where they should, and that failures have none."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import TRAINED_PHASE, GroupView, StepView, TrajectoryView
from stepgym.record.outcome import Outcome
from stepgym.run.episode import ENV_TURN

_CONCLUDED = (Outcome.CONTEXT_OVERFLOW, Outcome.EPISODE_TIMEOUT)
"""Outcomes after which the environment gives a last reward for a turn that it may not have seen."""
RARE = 0.02
"""Rewards on early turns are strange in an environment where fewer than this share of its episodes has one."""


@check("trajectory")
def reward_finite(view: TrajectoryView) -> Iterator[Fault]:
    """Every reward, and every part of one, is a finite number."""
    for each in view.steps:
        bad = [n for n, v in {"": each.step.reward, **each.step.reward_parts}.items() if not math.isfinite(v)]
        if bad:
            name = f"part {bad[0]!r} of the reward" if bad[0] else "reward"
            yield Fault(f"the {name} is not a finite number", _last(each), step=each.index)
    reward = view.trajectory.reward
    if reward is not None and not math.isfinite(reward):
        yield Fault(f"the trajectory's reward is {reward}")


@check("trajectory")
def reward_sum(view: TrajectoryView) -> Iterator[Fault]:
    """The rewards of the steps add up to the trajectory's reward.

    A warning where the agent acted with words that no turn said, whose reward then lies on no step.
    """
    reward = view.trajectory.reward
    if reward is None or not view.steps:
        return
    total = sum(each.step.reward for each in view.steps)
    if math.isfinite(total) and math.isfinite(reward) and not _near(total, reward):
        text = f"the rewards of the steps add up to {total:g}, but the trajectory's reward is {reward:g}"
        noted = sum(ENV_TURN in each.step.metrics for each in view.steps)
        if noted < view.trajectory.metrics.get("turns", 0):
            own = "the agent acted with words of its own, whose reward lies on no turn"
            yield Fault(f"{text}: {own}", severity="warning")
        else:
            yield Fault(text)


@check("trajectory")
def reward_range(view: TrajectoryView) -> Iterator[Fault]:
    """An episode's reward lies in the environment's `reward_range`."""
    low, high = view.trajectory.reward_range
    reward = view.trajectory.reward
    if reward is not None and math.isfinite(reward) and not (low - _slack(low) <= reward <= high + _slack(high)):
        yield Fault(f"the reward is {reward:g}, outside of the environment's range {low:g} to {high:g}")


@check("trajectory")
def reward_on_wrong_step(view: TrajectoryView) -> Iterator[Fault]:
    """A reward sits on the turn that earned it: one that the environment saw, and whose parts say the same.

    Wrong are a reward that differs from the sum of its parts where all rewards of the trajectory else agree with
    theirs, a reward on a turn that the agent gave up for another one, and one on a turn that the environment never saw.
    """
    rewarded = [each for each in view.steps if each.step.reward and math.isfinite(each.step.reward)]
    parted = [each for each in view.steps if each.step.reward_parts]
    whole = sum(view.trajectory.reward_parts.values()) if view.trajectory.reward_parts else None
    if parted and whole is not None and view.trajectory.reward is not None and _near(whole, view.trajectory.reward):
        for each in view.steps:
            parts = sum(each.step.reward_parts.values())
            if not _near(parts, each.step.reward) and math.isfinite(each.step.reward):
                yield Fault(
                    f"the reward is {each.step.reward:g}, but its parts add up to {parts:g}",
                    _last(each),
                    step=each.index,
                )
                return
    for each in rewarded:
        other = _kept_instead(view, each)
        if other is not None:
            yield Fault(
                f"the reward {each.step.reward:g} sits on a turn that was given up for step {other}",
                _last(each),
                step=each.index,
            )
            return
    seen = view.trajectory.metrics.get("turns")
    single = all(each.step.follows == (each.index - 1 if each.index else None) for each in view.steps)
    if seen is None or not single or view.trajectory.outcome in _CONCLUDED:
        return
    for each in rewarded:
        if each.index >= seen:
            yield Fault(
                f"the reward {each.step.reward:g} sits on turn {each.index + 1}, "
                f"but the environment saw {int(seen)} turns",
                _last(each),
                step=each.index,
            )
            return


@check("run", name="reward_on_wrong_step")
def _early_among_last(run: Statistics) -> Iterator[Fault]:
    """Where an environment rewards last turns, a reward on an earlier one may have been put there by mistake."""
    for env, places in run.rewarded_early.items():
        last, early = run.rewarded_last[env], run.rewarded_early_count[env]
        if early > last:
            continue
        for place in places:
            yield Fault(
                f"the episode's whole reward sits on an earlier turn, where it sits on the last one in {last} of "
                f"{last + early} episodes",
                place.token,
                severity="warning" if early <= RARE * (last + early) else "note",
                step=place.step,
                trajectory=place.trajectory,
            )


@check("trajectory")
def failure_in_baseline(view: TrajectoryView) -> Iterator[Fault]:
    """Failures of environment and infrastructure have no reward: a group's baseline is as if they had never been drawn
    (promise 12). Of each sample exactly one attempt is final, the last one.
    """
    trajectory = view.trajectory
    if not trajectory.outcome.scored:
        held = [name for name in ("reward", "success") if getattr(trajectory, name) is not None]
        if held:
            value = getattr(trajectory, held[0])
            yield Fault(f"the outcome is {trajectory.outcome}, and yet {held[0]} is {value}")


@check("group", name="failure_in_baseline")
def _one_final_attempt(group: GroupView) -> Iterator[Fault]:
    attempts: dict[int, list[tuple[int, bool]]] = {}
    for member in group.members:
        attempts.setdefault(member.id.sample, []).append((member.id.attempt, member.final))
    for sample, tried in attempts.items():
        final = [attempt for attempt, is_final in tried if is_final]
        if len(final) > 1:
            yield Fault(
                f"sample {sample} has {len(final)} final attempts ({', '.join(map(str, final))}): it counts twice",
                trajectory=f"{group.name}/{sample}/{final[-1]}",
            )
        elif final and max(attempt for attempt, _ in tried) > final[0]:
            yield Fault(
                f"attempt {final[0]} of sample {sample} is final, although it was tried again",
                trajectory=f"{group.name}/{sample}/{final[0]}",
            )


@check("run", name="failure_in_baseline")
def _metrics_count_no_failure(run: Statistics) -> Iterator[Fault]:
    """What `metrics.jsonl` says was trained on is no more than what could be."""
    for row in run.facts.metrics:
        iteration, members = row.get("iteration"), row.get("members")
        if not isinstance(members, int | float) or not isinstance(iteration, int):
            continue
        stored, standing = run.counted.get((TRAINED_PHASE, iteration), (0, 0))
        if stored and members > standing:
            yield Fault(
                f"the update of iteration {iteration} counted {int(members)} episodes, "
                f"but only {standing} of the {stored} that are stored could be scored"
            )


def _kept_instead(view: TrajectoryView, each: StepView) -> int | None:
    """A later turn at the same place of the conversation, which the episode went on with instead of this one."""
    if view.followed[each.index] or each.index == len(view.steps) - 1:
        return None
    for other in view.steps[each.index + 1 :]:
        same = other.step.follows == each.step.follows and list(other.step.new_messages) == list(each.step.new_messages)
        if same and (view.followed[other.index] or other.index == len(view.steps) - 1):
            return other.index
    return None


def _last(view: StepView) -> int | None:
    return view.step.length - 1 if view.has_ids and view.step.length else None


def _slack(value: float) -> float:
    return 1e-6 * max(1.0, abs(value))


def _near(left: float, right: float) -> bool:
    return abs(left - right) <= _slack(max(abs(left), abs(right)))
