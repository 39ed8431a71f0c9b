"""The KL to a reference as a cost: rewards lowered before credit is assigned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepgym.credit.group import GroupRewards


def lower_rewards(group: GroupRewards, kl: Sequence[NDArray[np.float64]], coef: float) -> GroupRewards:
    """A group whose rewards pay for the distance to the reference: r_it - coef * KL_it, for each step.

    KL_it is the sum over the step's trained tokens of an estimate of log pi_old - log reference. A trajectory's reward
    falls by the sum over its steps, so that its step rewards still sum to it. Rewards that were equal seldom stay so:
    their group then has signal.

    Source: Ziegler et al. 2019, Fine-tuning language models from human preferences (arXiv:1909.08593), equation 2.

    Args:
        group: The rewards after treatment.
        kl: One float64 array [steps] per member.
        coef: Weight of the KL.

    Raises:
        ValueError: `kl` has another shape than the step rewards.
    """
    if [len(values) for values in kl] != [len(rewards) for rewards in group.step_rewards]:
        raise ValueError("the KL's steps are not as many as the step rewards")
    costs = [coef * np.asarray(values, dtype=np.float64) for values in kl]
    totals = np.array([cost.sum() for cost in costs], dtype=np.float64)
    lowered = [rewards - cost for rewards, cost in zip(group.step_rewards, costs, strict=True)]
    return replace(group, rewards=group.rewards - totals, step_rewards=lowered)
