"""Discounted turn returns against a baseline of the group's trajectories."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from stepgym.credit.group import EPSILON, Advantages, GroupRewards
from stepgym.credit.returns import discounted, moments, or_reward


def turn_returns(
    group: GroupRewards,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    scale_by_std: bool = True,
) -> Advantages:
    """Turn-level credit, A_it = (G_it - b_i) / (s + 1e-6), with the return G_it = sum over k >= t of gamma^(k-t) r_ik.

    A trajectory's value is the mean of its turns' returns, so long trajectories pull the baseline no harder than short
    ones: b is the mean of the group's values (`mean`) or of the others' values (`leave_one_out`), and
    s^2 = sum over i of mean over t of (G_it - mean of the values)^2 / (n - 1). With gamma = 1 and a terminal reward
    only every G_it is the trajectory's reward, and this is GRPO, or RLOO without the standard deviation. A trajectory
    without turns counts with its reward. A group of one gets 0.

    Source: REINFORCE with reward to go (Williams 1992; Sutton & Barto 2018, section 13.3) at the granularity of turns,
    with the group baseline of arXiv:2402.03300.

    Args:
        group: The rewards of one group.
        gamma: Discount per turn.
        baseline: Which trajectories the baseline is taken over.
        scale_by_std: Divide by the standard deviation.
    """
    count = len(group.rewards)
    if count < 2:
        return group.over_steps(np.zeros(count))
    returns = [discounted(rewards, gamma) for rewards in group.step_rewards]
    turns = or_reward(returns, group)
    values = np.array([steps.mean() for steps in turns])
    mean, deviation = moments(turns)
    baselines = np.full(count, mean) if baseline == "mean" else (values.sum() - values) / (count - 1)
    scale = deviation + EPSILON if scale_by_std else 1.0
    return [(steps - base) / scale for steps, base in zip(returns, baselines, strict=True)]
