"""What a credit estimator is given: the rewards of one group. What it returns: one advantage per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Advantages: TypeAlias = list[NDArray[np.float64]]
"""One array [steps] per member of a group: the advantage of each of its steps."""

CreditFunction: TypeAlias = Callable[..., Advantages]
"""`credit(group: GroupRewards, *, options) -> Advantages`. Its options are keyword-only parameters."""

EPSILON = 1e-6
"""Added to denominators. Also the tolerance within which the rewards of a group count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupRewards:
    """The rewards of the members of one group, after treatment.

    Attributes:
        rewards: float64 array [members], the reward of each trajectory.
        step_rewards: One float64 array [steps] per member, which sums to the member's reward. Empty for a trajectory
            without steps.
    """

    rewards: NDArray[np.float64]
    step_rewards: Sequence[NDArray[np.float64]]

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.step_rewards):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.step_rewards)} lists of step rewards")

    @property
    def spread(self) -> float:
        """Highest reward minus lowest; 0 for an empty group."""
        return float(np.ptp(self.rewards)) if len(self.rewards) else 0.0

    def over_steps(self, advantages: NDArray[np.float64]) -> Advantages:
        """One number per trajectory ([members]), given to each of its steps: what an outcome estimator returns."""
        return [np.full(len(steps), value) for steps, value in zip(self.step_rewards, advantages, strict=True)]


def assign(function: CreditFunction, group: GroupRewards, options: Mapping[str, Any]) -> Advantages:
    """Call an estimator and check what it returned.

    Returns one float64 array [steps] per member. Raises `ValueError` when the estimator returned anything else, or a
    number that is not finite.
    """
    advantages = [np.asarray(values, dtype=np.float64) for values in function(group, **options)]
    name = getattr(function, "__name__", repr(function))
    found = [values.shape for values in advantages]
    expected = [(len(steps),) for steps in group.step_rewards]
    if found != expected:
        raise ValueError(f"credit {name} returned advantages of shapes {found} for steps of shapes {expected}")
    if not all(np.isfinite(values).all() for values in advantages):
        raise ValueError(f"credit {name} returned an advantage that is not finite")
    return advantages


def has_signal(group: GroupRewards, advantages: Advantages) -> bool:
    """Whether a group can teach anything: its rewards differ, or its advantages differ from turn to turn.

    A group of one never does. Under outcome credit a trajectory's steps share one advantage, so only the rewards
    decide; their spread is compared with `EPSILON`, because a standard deviation of rounding errors would otherwise
    turn into advantages of ordinary size.
    """
    if len(group.rewards) < 2:
        return False
    return group.spread > EPSILON or any(len(steps) > 1 and np.ptp(steps) > EPSILON for steps in advantages)
