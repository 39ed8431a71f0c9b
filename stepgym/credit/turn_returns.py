"""Discounted turn returns against a baseline of the group's trajectories."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from stepgym.credit.group import EPSILON, Advantages, GroupRewards


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
    turns = [steps if len(steps) else np.array([reward]) for steps, reward in zip(returns, group.rewards, strict=True)]
    values = np.array([steps.mean() for steps in turns])
    mean = values.mean()
    baselines = np.full(count, mean) if baseline == "mean" else (values.sum() - values) / (count - 1)
    scale = 1.0
    if scale_by_std:
        scale = float(np.sqrt(sum(((steps - mean) ** 2).mean() for steps in turns) / (count - 1))) + EPSILON
    return [(steps - base) / scale for steps, base in zip(returns, baselines, strict=True)]


def discounted(rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Return of each turn ([steps]): its reward plus `gamma` times the return of the next."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        following = float(rewards[turn]) + gamma * following
        returns[turn] = following
    return returns
