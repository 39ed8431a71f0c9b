"""Whether one evaluation is better than another by more than chance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.run.resampling import Interval, bootstrap_interval, permutation_p_value
from stepgym.run.statistics import Evaluation

SIGNIFICANCE = 0.05
"""A difference with a p-value below this is called larger than chance."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure on both sides, over the tasks that both have.

    Attributes:
        a, b: Mean over the paired tasks, on each side.
        difference: b - a.
        ci95: (low, high) of the difference, by a bootstrap over pairs; None with fewer than two pairs.
        p_value: Two-sided, by a permutation test over pairs.
    """

    a: float
    b: float
    difference: float
    ci95: Interval | None
    p_value: float

    @property
    def larger_than_chance(self) -> bool:
        """Whether the p-value is below 0.05."""
        return self.p_value < SIGNIFICANCE

    @property
    def verdict(self) -> str:
        """`larger than chance` or `not larger than chance`."""
        return "larger than chance" if self.larger_than_chance else "not larger than chance"

    def to_dict(self) -> dict[str, Any]:
        """All of it, with the verdict, ready for `json.dumps`."""
        return {**asdict(self), "ci95": list(self.ci95) if self.ci95 else None, "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two evaluations, paired by task.

    Attributes:
        tasks: Pairs: tasks that both sides scored.
        only_a, only_b: Tasks that only one side scored; they are left out.
        changed: Ids that both sides have, for tasks whose answer or data differ; they are left out too.
        success: The difference in success.
        reward: The difference in mean reward.
        incomplete: Whether either evaluation is incomplete.
    """

    tasks: int
    only_a: int
    only_b: int
    changed: int
    success: Difference
    reward: Difference
    incomplete: bool

    @property
    def verdict(self) -> str:
        """One sentence: which side solves more, by how much, and whether chance could have done it."""
        by = abs(self.success.difference)
        if by == 0:
            return f"A and B solve the same share of the {self.tasks} tasks that both have"
        better, worse = ("B", "A") if self.success.difference > 0 else ("A", "B")
        return (
            f"{better} solves {100 * by:.1f} points more than {worse} on the {self.tasks} tasks that both have: "
            f"{self.success.verdict} (p = {self.success.p_value:.2g})"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, with the verdict, ready for `json.dumps`."""
        return {
            "tasks": self.tasks,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "changed": self.changed,
            "success": self.success.to_dict(),
            "reward": self.reward.to_dict(),
            "incomplete": self.incomplete,
            "verdict": self.verdict,
        }


def compare(a: Evaluation, b: Evaluation, *, seed: int = 0, resamples: int = 10_000) -> Comparison:
    """Compare two evaluations task by task.

    Only tasks that both scored enter, and only where the two are really the same task (same id, answer and data), so a
    difference in which tasks were drawn, or failed, cannot pass for a difference between the agents.

    Args:
        a: The first side, usually the baseline.
        b: The other side. Differences are b - a.
        seed: Seeds the resampling.
        resamples: Number of bootstrap resamples and of random permutations.

    Raises:
        UserError: The two are of different environments, or have no task in common.
    """
    if a.env_id and b.env_id and a.env_id != b.env_id:
        raise UserError(f"cannot compare: A is of the environment {a.env_id!r}, B of {b.env_id!r}")
    common = sorted(set(a.per_task) & set(b.per_task))
    paired = [task for task in common if a.per_task[task].digest == b.per_task[task].digest]
    if not paired:
        why = "the ids they share name different tasks" if common else f"{a.tasks} and {b.tasks} tasks, none in both"
        raise UserError(f"cannot compare: no task in common ({why}); evaluate both on the same tasks")
    measure = {
        name: np.array([[getattr(side.per_task[task], name) for task in paired] for side in (a, b)])
        for name in ("success", "reward")
    }
    return Comparison(
        tasks=len(paired),
        only_a=a.tasks - len(common),
        only_b=b.tasks - len(common),
        changed=len(common) - len(paired),
        success=_difference(*measure["success"], span=1.0, seed=seed, resamples=resamples),
        reward=_difference(*measure["reward"], span=None, seed=seed, resamples=resamples),
        incomplete=a.incomplete or b.incomplete,
    )


def _difference(
    a: NDArray[np.float64], b: NDArray[np.float64], *, span: float | None, seed: int, resamples: int
) -> Difference:
    """The difference of paired values; `span` is how far apart two can be, where that is bounded."""
    differences = b - a
    reach = np.inf if span is None else span
    return Difference(
        a=float(a.mean()),
        b=float(b.mean()),
        difference=float(differences.mean()),
        ci95=bootstrap_interval(differences, bounds=(-reach, reach), seed=seed, resamples=resamples),
        p_value=permutation_p_value(differences, seed=seed, permutations=resamples),
    )
