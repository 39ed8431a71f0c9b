"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

import numpy as np

from stepgym.credit.group import Advantages, GroupRewards


def rloo(group: GroupRewards) -> Advantages:
    """Outcome credit, A_i = r_i - mean of the others' rewards, which is n / (n - 1) * (r_i - mean(r)).

    Each step of a trajectory gets its trajectory's advantage. A group of one has no others and gets 0.

    Source: Kool et al. 2019, Buy 4 REINFORCE samples, get a baseline for free; Ahmadian et al. 2024, Back to basics
    (arXiv:2402.14740).

    Args:
        group: The rewards of one group.
    """
    rewards = group.rewards
    count = len(rewards)
    if count < 2:
        return group.over_steps(np.zeros(count))
    return group.over_steps((rewards - rewards.mean()) * (count / (count - 1)))
