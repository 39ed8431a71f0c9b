"""GRPO done right: rewards centred within their group, and nothing else."""

from __future__ import annotations

import numpy as np

from stepgym.credit.group import Advantages, GroupRewards


def dr_grpo(group: GroupRewards) -> Advantages:
    """Outcome credit, A_i = r_i - mean(r).

    No standard deviation, so that questions on which nearly all samples agree weigh no more than others. It is one
    half of Dr. GRPO; the other half is the reduction: the sum over a trajectory's tokens divided by a constant, not by
    their number, so that long wrong answers are not punished less per token (`reduction: {kind: constant, tokens: N}`).
    Each step of a trajectory gets its trajectory's advantage. A group of one gets 0.

    Source: Liu et al. 2025, Understanding R1-Zero-like training: a critical perspective (arXiv:2503.20783), section
    3.2.

    Args:
        group: The rewards of one group.
    """
    rewards = group.rewards
    if len(rewards) < 2:
        return group.over_steps(np.zeros(len(rewards)))
    return group.over_steps(rewards - rewards.mean())
