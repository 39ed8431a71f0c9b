"""Returns of turns, and their mean and spread over trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stepgym.credit.group import GroupRewards


def discounted(rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Return of each turn ([steps]): its reward plus `gamma` times the return of the next."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        following = float(rewards[turn]) + gamma * following
        returns[turn] = following
    return returns


def or_reward(turns: Sequence[NDArray[np.float64]], group: GroupRewards) -> list[NDArray[np.float64]]:
    """The values of each member's turns; a member without turns counts with its reward, as if it had one."""
    return [values if len(values) else np.array([r]) for values, r in zip(turns, group.rewards, strict=True)]


def moments(turns: Iterable[NDArray[np.float64]]) -> tuple[float, float]:
    """Mean and standard deviation of turns, over trajectories: each trajectory counts once, however many turns it has.

    mean = mean over i of mean over t of x_it; variance = sum over i of mean over t of (x_it - mean)^2 / (n - 1). Where
    every turn of a trajectory has the same value these are the ordinary mean and unbiased variance of n numbers.

    Args:
        turns: One array per trajectory, none of them empty.

    Returns:
        The mean, 0 for no trajectories; the standard deviation, 0 for fewer than two.
    """
    arrays = list(turns)
    count = len(arrays)
    if not count:
        return 0.0, 0.0
    mean = float(np.mean([values.mean() for values in arrays]))
    if count < 2:
        return mean, 0.0
    return mean, float(np.sqrt(sum(((values - mean) ** 2).mean() for values in arrays) / (count - 1)))
