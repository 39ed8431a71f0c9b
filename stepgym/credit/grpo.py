"""Group relative policy optimisation: rewards standardised within their group."""

from __future__ import annotations

import numpy as np

from stepgym.credit.group import EPSILON, Advantages, GroupRewards


def grpo(group: GroupRewards, *, scale_by_std: bool = True) -> Advantages:
    """Outcome credit, A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the unbiased (ddof = 1) standard deviation.

    Each step of a trajectory gets its trajectory's advantage. A group of one gets 0.

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2. Without the standard deviation it is the
    advantage of Dr. GRPO: Liu et al. 2025 (arXiv:2503.20783).

    Args:
        group: The rewards of one group.
        scale_by_std: Divide by the standard deviation. False keeps groups of small variance from weighing more than
            their rewards say.
    """
    rewards = group.rewards
    if len(rewards) < 2:
        return group.over_steps(np.zeros(len(rewards)))
    centred = rewards - rewards.mean()
    return group.over_steps(centred / (rewards.std(ddof=1) + EPSILON) if scale_by_std else centred)
