"""REINFORCE++: returns standardised over the whole batch, not over a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from stepgym.credit.group import EPSILON, Advantages, GroupRewards
from stepgym.credit.level import group_baseline, over_batch
from stepgym.credit.returns import discounted, moments, or_reward


@over_batch
def reinforce_plus_plus(
    groups: Sequence[GroupRewards], *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
) -> list[Advantages]:
    """Batch-level credit, A_it = (G_it - mean(G)) / (std(G) + 1e-6), with G_it = sum over k >= t of gamma^(k-t) r_ik.

    Mean and standard deviation (ddof = 1) are over the batch's trajectories, each counted once (see `moments`): a
    trajectory of thirty turns pulls them no harder than one of a single turn. With gamma = 1 and a terminal reward only
    every step gets (r_i - mean(r)) / std(r). With the KL in the reward a turn's return holds the KL of that turn and
    the ones after it; the paper sums it from each token on. It does not compare within a group, so one sample per task
    is enough, and a group of one or of equal rewards teaches too. A batch of one trajectory gets 0.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), the advantage with global normalisation.

    Args:
        groups: The rewards of every group of a batch.
        gamma: Discount per turn.
    """
    returns = [[discounted(rewards, gamma) for rewards in group.step_rewards] for group in groups]
    turns = [or_reward(members, group) for members, group in zip(returns, groups, strict=True)]
    if sum(len(group.rewards) for group in groups) < 2:
        return [[np.zeros(len(values)) for values in members] for members in returns]
    mean, deviation = moments(values for members in turns for values in members)
    return [[(values - mean) / (deviation + EPSILON) for values in members] for members in returns]


@over_batch
@group_baseline(True)
def reinforce_plus_plus_baseline(groups: Sequence[GroupRewards]) -> list[Advantages]:
    """Outcome credit, A_i = (d_i - mean(d)) / (std(d) + 1e-6), with d_i = r_i - the mean reward of i's group.

    The group's mean is the baseline; mean and standard deviation (ddof = 1) of what is left are over all trajectories
    of the batch, each counted once, so no group is blown up by its own small spread. Each step of a trajectory gets its
    trajectory's advantage. A group of one is its own mean: it gets 0 and is left out of mean and deviation.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), the variant with a baseline.

    Args:
        groups: The rewards of every group of a batch.
    """
    centred = [group.rewards - group.rewards.mean() if len(group.rewards) else group.rewards for group in groups]
    mean, deviation = moments(np.array([value]) for values in centred if len(values) > 1 for value in values)
    return [
        group.over_steps((values - mean) / (deviation + EPSILON) if len(values) > 1 else np.zeros(len(values)))
        for group, values in zip(groups, centred, strict=True)
    ]
