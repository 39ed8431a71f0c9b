"""What a credit estimator is given: the rewards of one group. What it returns: one advantage per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepgym.credit.level import has_group_baseline, level
from stepgym.record.step import Step

Advantages: TypeAlias = list[NDArray[np.float64]]
"""One array [steps] per member of a group: the advantage of each of its steps."""

CreditFunction: TypeAlias = Callable[..., Any]
"""An estimator. Its options are keyword-only parameters.

- `credit(group: GroupRewards, *, options) -> Advantages`;
- declared with `@over_batch`: `credit(groups: Sequence[GroupRewards], *, options) -> list[Advantages]`;
- declared with `@over_tokens`: `credit(batch: TokenRewards, *, options) -> TokenAdvantages`.
"""

EPSILON = 1e-6
"""Added to denominators. Also the tolerance within which the rewards of a group count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupRewards:
    """The rewards of the members of one group, after treatment.

    Attributes:
        rewards: float64 array [members], the reward of each trajectory.
        step_rewards: One float64 array [steps] per member, which sums to the member's reward. Empty for a trajectory
            without steps.
        steps: The recorded steps of each member, for estimators that look at more than rewards; None where there are
            only rewards.
    """

    rewards: NDArray[np.float64]
    step_rewards: Sequence[NDArray[np.float64]]
    steps: Sequence[Sequence[Step]] | None = None

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.step_rewards):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.step_rewards)} lists of step rewards")
        if self.steps is not None and [len(steps) for steps in self.steps] != [len(r) for r in self.step_rewards]:
            raise ValueError("the steps are not as many as the step rewards")

    @property
    def spread(self) -> float:
        """Highest reward minus lowest; 0 for an empty group."""
        return float(np.ptp(self.rewards)) if len(self.rewards) else 0.0

    def over_steps(self, advantages: NDArray[np.float64]) -> Advantages:
        """One number per trajectory ([members]), given to each of its steps: what an outcome estimator returns."""
        return [np.full(len(steps), value) for steps, value in zip(self.step_rewards, advantages, strict=True)]


def assign(function: CreditFunction, group: GroupRewards, options: Mapping[str, Any]) -> Advantages:
    """`assign_all` for a batch of one group."""
    return assign_all(function, [group], options)[0]


def assign_all(
    function: CreditFunction, groups: Sequence[GroupRewards], options: Mapping[str, Any]
) -> list[Advantages]:
    """Call an estimator for all groups of a batch, one by one or together as it declares, and check what it returned.

    Args:
        function: An estimator over groups or over batches.
        groups: Every group of the batch.
        options: Its keyword arguments.

    Returns:
        Per group one float64 array [steps] per member.

    Raises:
        ValueError: The estimator returned other shapes, or a number that is not finite; or it gives advantages to
            tokens (`assign_tokens` is for those).
    """
    name = getattr(function, "__name__", repr(function))
    if level(function) == "token":
        raise ValueError(f"credit {name} gives each token its own advantage, from a critic's values")
    if level(function) == "batch":
        returned = list(function(groups, **options))
        if len(returned) != len(groups):
            raise ValueError(f"credit {name} returned the advantages of {len(returned)} groups for {len(groups)}")
    else:
        returned = [function(group, **options) for group in groups]
    return [_checked(advantages, group, name) for advantages, group in zip(returned, groups, strict=True)]


def _checked(returned: Sequence[NDArray[np.float64]], group: GroupRewards, name: str) -> Advantages:
    advantages = [np.asarray(values, dtype=np.float64) for values in returned]
    found = [values.shape for values in advantages]
    expected = [(len(steps),) for steps in group.step_rewards]
    if found != expected:
        raise ValueError(f"credit {name} returned advantages of shapes {found} for steps of shapes {expected}")
    if not all(np.isfinite(values).all() for values in advantages):
        raise ValueError(f"credit {name} returned an advantage that is not finite")
    return advantages


def has_signal(
    group: GroupRewards,
    advantages: Advantages,
    function: CreditFunction | None = None,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Whether a group can teach anything.

    It cannot where no advantage is larger than `EPSILON`. Under an estimator that compares the members of a group, a
    group of one never does either, and its rewards have to differ, or else its advantages from turn to turn. Under
    outcome credit a trajectory's steps share one advantage, so only the rewards decide; their spread is compared with
    `EPSILON`, because a standard deviation of rounding errors would otherwise turn into advantages of ordinary size.

    Args:
        group: The rewards that the estimator was given.
        advantages: What it returned.
        function, options: The estimator; without one, as if it gives outcome credit within the group.
    """
    if not any(bool((np.abs(steps) > EPSILON).any()) for steps in advantages):
        return False
    if function is not None and not has_group_baseline(function, options or {}):
        return True
    if len(group.rewards) < 2:
        return False
    if group.spread > EPSILON or any(len(steps) > 1 and np.ptp(steps) > EPSILON for steps in advantages):
        return True
    # Each trajectory has one advantage for all its steps, and rewards are equal. Is that outcome credit on rounding
    # errors, or did equal rewards come in unequal portions (0.5 and 0.5 against 1)? Outcome credit sees only the sum.
    if function is None or level(function) != "group":
        return False
    pairs = zip(group.step_rewards, group.rewards, strict=True)
    at_the_end = [np.array([0.0] * (len(steps) - 1) + [reward]) if len(steps) else steps for steps, reward in pairs]
    others = assign(function, replace(group, step_rewards=at_the_end), options or {})
    return any(bool((np.abs(a - b) > EPSILON).any()) for a, b in zip(advantages, others, strict=True))
