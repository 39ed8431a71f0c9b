"""Each step its own reward: no look at what came of it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from stepgym.credit.group import EPSILON, Advantages, GroupRewards
from stepgym.credit.level import group_baseline
from stepgym.credit.returns import moments, or_reward


@group_baseline(False, normalise="none")
def step_rewards(group: GroupRewards, *, normalise: Literal["group", "turn", "none"] = "group") -> Advantages:
    """Turn-level credit, A_it = (r_it - mean) / (std + 1e-6), from the reward of the step alone.

    For environments that judge every turn (a process reward); a step gets no credit for what it made possible later,
    for which there is `turn_returns`. With a terminal reward only, just the last turn of a trajectory learns. Standard
    deviations have ddof = 1; a group of one gets 0, unless nothing is compared.

    Source: process supervision of GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.3, without its sum over later
    steps; per turn: Zeng et al. 2025 (arXiv:2505.11821).

    Args:
        group: The rewards of one group.
        normalise: Which rewards a step is compared with: `group`, those of all turns of the group, each trajectory
            counted once however many turns it has; `turn`, those of the same turn number in the group (a turn that
            only one trajectory reached gets 0); `none`, no rewards: A_it = r_it.
    """
    if normalise == "none":
        return [rewards.copy() for rewards in group.step_rewards]
    count = len(group.rewards)
    if count < 2:
        return group.over_steps(np.zeros(count))
    if normalise == "group":
        mean, deviation = moments(or_reward(group.step_rewards, group))
        return [(rewards - mean) / (deviation + EPSILON) for rewards in group.step_rewards]
    advantages = [np.zeros(len(rewards)) for rewards in group.step_rewards]
    for turn in range(max(len(rewards) for rewards in group.step_rewards)):
        present = [i for i, rewards in enumerate(group.step_rewards) if len(rewards) > turn]
        if len(present) < 2:
            break
        values = np.array([group.step_rewards[i][turn] for i in present])
        for i, value in zip(present, (values - values.mean()) / (values.std(ddof=1) + EPSILON), strict=True):
            advantages[i][turn] = value
    return advantages
