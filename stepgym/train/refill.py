"""Dynamic sampling: groups that can teach nothing are replaced by groups of other tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from stepgym.credit.group import assign, has_signal
from stepgym.credit.level import has_group_baseline, level
from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.trajectory import Trajectory

if TYPE_CHECKING:
    from stepgym.train.config import LearnerConfig

GroupKey = tuple[str, int, str]


class RefillConfig(BaseModel):
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).

    When a lot of rollouts has been played, its groups without signal (all rewards equal, fewer than two members that
    can be trained on, or no advantage) are replaced: as many other tasks of the training split are drawn, by the run's
    seed, and played in their place, under the same iteration; and again, until every group has a signal or the rounds
    are used up. What is without signal then stays. Groups that were replaced are stored and counted in the metrics of
    rollouts, but not learned from. It is decided on trajectories, after treatment, so a turn more or less does not
    matter, and from what is stored, so a run that is resumed decides as it did before.

    (More samples of the same task would bias what is trained on: they are drawn until they differ.)

    Attributes:
        rounds: Most times that groups of one lot are replaced; 0: never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(default=0, ge=0)


def check_refill(config: RefillConfig, algorithm: LearnerConfig, samples: int) -> None:
    """Refuse what would never refill, or always. Raises `UserError`."""
    if not config.rounds:
        return
    if samples < 2:
        raise UserError(
            "refill.rounds: with rollout.samples: 1 no group ever has two members, so all would be replaced"
        )
    function, options = algorithm.function("credit"), algorithm.credit.options
    if level(function) == "token" or not has_group_baseline(function, options):
        raise UserError(
            f"refill.rounds: with credit {algorithm.credit.kind!r} a group whose rewards are equal teaches too, "
            "because its members are not compared with one another; set it to 0"
        )


def without_signal(
    trajectories: Iterable[Trajectory], outcomes: OutcomePolicy, algorithm: LearnerConfig
) -> set[GroupKey]:
    """The groups that the learner would find nothing in.

    Args:
        trajectories: Whole groups.
        outcomes: What each outcome means for training.
        algorithm: Has the credit estimator that decides.
    """
    trajectories = list(trajectories)
    function, options = algorithm.function("credit"), algorithm.credit.options
    groups, _ = treat(trajectories, outcomes)
    informative = {
        group.key
        for group in groups
        if len(group.members) > 1
        and has_signal(group.rewards, assign(function, group.rewards, options), function, options)
    }
    return {trajectory.id.group for trajectory in trajectories} - informative
