"""From trajectories to groups of members: what the outcome policy keeps, with the reward it gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepgym.credit.group import GroupRewards
from stepgym.errors import UserError
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One trajectory that is trained on.

    Attributes:
        trajectory: The record, as it was made.
        reward: Its reward after treatment.
        step_rewards: float64 array [steps], which sums to `reward`. What treatment changed sits on the last step.
    """

    trajectory: Trajectory
    reward: float
    step_rewards: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The members that share a task in one batch, in the order of their sample index.

    Attributes:
        key: (phase, iteration, task id).
        members: The trajectories that are trained on; at least one.
    """

    key: tuple[str, int, str]
    members: Sequence[Member]

    @property
    def rewards(self) -> GroupRewards:
        """What a credit estimator is given."""
        rewards = np.array([member.reward for member in self.members], dtype=np.float64)
        step_rewards = [member.step_rewards for member in self.members]
        return GroupRewards(rewards, step_rewards, [member.trajectory.steps for member in self.members])


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """How many samples of a batch became members, by outcome.

    Attributes:
        kept, masked, dropped: Outcome to number of samples. Masked and dropped ones leave their group as if they had
            never been drawn. A sample without a reward counts as dropped.
    """

    kept: Mapping[Outcome, int] = field(default_factory=dict)
    masked: Mapping[Outcome, int] = field(default_factory=dict)
    dropped: Mapping[Outcome, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """`{"kept": {outcome: number}, "masked": ..., "dropped": ...}`."""
        return {name: {str(o): n for o, n in getattr(self, name).items()} for name in ("kept", "masked", "dropped")}


def treat(trajectories: Iterable[Trajectory], policy: OutcomePolicy) -> tuple[list[Group], OutcomeCounts]:
    """Form groups of what is trained on.

    A member is a final trajectory whose treatment trains and that has a reward: the recorded one, or the one that its
    treatment gives. Attempts that are not final are never counted. Groups are in the order of their key and members
    in the order of their sample index, so the result does not depend on the order in which episodes finished.

    Returns:
        The groups that have a member, and the counts by outcome.

    Raises:
        UserError: Two attempts of one sample are both final, or a reward is not finite.
    """
    counts: dict[str, dict[Outcome, int]] = {"kept": {}, "masked": {}, "dropped": {}}
    groups: dict[tuple[str, int, str], dict[int, Member]] = {}
    seen: set[tuple[tuple[str, int, str], int]] = set()
    for trajectory in trajectories:
        if not trajectory.final:
            continue
        sample = (trajectory.id.group, trajectory.id.sample)
        if sample in seen:
            raise UserError(f"trajectory {trajectory.id}: another attempt of this sample is final too; only one may be")
        seen.add(sample)
        fate, reward = _fate(trajectory, policy)
        counts[fate][trajectory.outcome] = counts[fate].get(trajectory.outcome, 0) + 1
        if reward is not None:
            groups.setdefault(trajectory.id.group, {})[trajectory.id.sample] = _member(trajectory, reward)
    ordered = [Group(key, [members[sample] for sample in sorted(members)]) for key, members in sorted(groups.items())]
    return ordered, OutcomeCounts(**counts)


def _fate(trajectory: Trajectory, policy: OutcomePolicy) -> tuple[str, float | None]:
    """`kept`, `masked` or `dropped`, and the reward after treatment (None unless kept)."""
    treatment = policy[trajectory.outcome]
    if not treatment.train:
        return ("masked" if treatment.on_exhausted == "mask" else "dropped"), None
    if treatment.reward == "keep":
        reward = trajectory.reward
    elif treatment.reward == "lowest":
        reward = trajectory.reward_range[0]
    else:
        reward = float(treatment.reward)
    if reward is None:  # unscorable is not zero
        return "dropped", None
    if not math.isfinite(reward):
        raise UserError(f"trajectory {trajectory.id}: the reward {reward} is not finite")
    return "kept", reward


def _member(trajectory: Trajectory, reward: float) -> Member:
    step_rewards = np.array([step.reward for step in trajectory.steps], dtype=np.float64)
    if len(step_rewards):
        step_rewards[-1] += reward - step_rewards.sum()
    return Member(trajectory, reward, step_rewards)
