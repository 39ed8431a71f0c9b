"""Maximum likelihood reinforcement learning: rewards relative to the group's mean reward."""

from __future__ import annotations

import numpy as np

from stepgym.credit.group import EPSILON, Advantages, GroupRewards


def maxrl(group: GroupRewards) -> Advantages:
    """Outcome credit, A_i = (r_i - mean(r)) / (mean(r) + 1e-6), and 0 for the whole group where mean(r) <= 0.

    For rewards of 0 and 1 its expectation is the gradient of a truncated log-likelihood of success, so hard tasks weigh
    more. The formula means nothing once the mean is not positive: it would turn the sign of every advantage around
    (rewards -1, -1, 0, 1 would become 3, 3, -1, -5). Each step of a trajectory gets its trajectory's advantage; a
    group of one gets 0.

    Source: Tajwar et al. 2026, Maximum likelihood reinforcement learning (arXiv:2602.02710).

    Args:
        group: The rewards of one group.
    """
    rewards = group.rewards
    mean = rewards.mean() if len(rewards) else 0.0
    if len(rewards) < 2 or mean <= 0:
        return group.over_steps(np.zeros(len(rewards)))
    return group.over_steps((rewards - mean) / (mean + EPSILON))
