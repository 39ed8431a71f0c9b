"""REINFORCE: the return of each turn, against the mean of the batch or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from stepgym.credit.group import Advantages, GroupRewards
from stepgym.credit.level import over_batch
from stepgym.credit.returns import discounted, moments, or_reward


@over_batch
def reinforce(
    groups: Sequence[GroupRewards],
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    baseline: Literal["batch", "none"] = "batch",
) -> list[Advantages]:
    """Batch-level credit, A_it = G_it - b, with the return G_it = sum over k >= t of gamma^(k-t) r_ik.

    b is the mean over the batch's trajectories of the mean return of their turns (`batch`), or 0 (`none`). It does not
    compare within a group, so one sample per task is enough, and a group of one or of equal rewards teaches too.

    Source: Williams 1992, Simple statistical gradient-following algorithms (REINFORCE); a constant baseline: section 4
    there.

    Args:
        groups: The rewards of every group of a batch.
        gamma: Discount per turn. With 1 and a terminal reward only every turn's return is the trajectory's reward.
        baseline: What is subtracted.
    """
    returns = [[discounted(rewards, gamma) for rewards in group.step_rewards] for group in groups]
    base = 0.0
    if baseline == "batch":
        turns = [or_reward(members, group) for members, group in zip(returns, groups, strict=True)]
        base, _ = moments(values for members in turns for values in members)
    return [[values - base for values in members] for members in returns]
