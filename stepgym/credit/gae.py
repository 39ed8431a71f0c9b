"""Generalised advantage estimation: a critic's errors, summed from each token on."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from stepgym.credit.group import EPSILON
from stepgym.credit.level import over_tokens
from stepgym.credit.token_rewards import TokenAdvantages, TokenRewards


@over_tokens
def gae(
    batch: TokenRewards,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whiten: bool = True,
) -> TokenAdvantages:
    """Token-level credit, A_t = sum over l >= 0 of (gamma * lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t.

    t runs over the trained tokens of a trajectory in the order of its steps; observations are no part of it, so after
    a step's last token comes the next step's first. The value after the last token is 0: an episode that ended is worth
    nothing more. The returns that the critic learns are A_t + V_t, before whitening. gamma = lambda = 1, the default
    and usual for language models, makes the return the sum of the rewards still to come.

    Needs a critic (`critic` in the algorithm's config) and trajectories whose every step extends the one before it;
    others are refused.

    Source: Schulman et al. 2015, High-dimensional continuous control using generalized advantage estimation
    (arXiv:1506.02438), equation 16; whitening over the batch: Huang et al. 2024, The N+ implementation details
    of RLHF with PPO (arXiv:2403.17031).

    Args:
        batch: Values and rewards of the trained tokens.
        gamma: Discount per token.
        gae_lambda: Between trusting the critic (0: one step ahead) and the rewards alone (1).
        whiten: Shift and scale the batch's advantages to mean 0 and variance 1, over tokens.
    """
    values, following = batch.values, np.zeros(len(batch.values))
    goes_on = batch.trajectory[1:] == batch.trajectory[:-1]
    following[:-1] = np.where(goes_on, values[1:], 0.0)
    delta = batch.rewards + gamma * following - values
    raw, decay, after = np.zeros(len(values)), gamma * gae_lambda, 0.0
    for token in range(len(values) - 1, -1, -1):
        after = float(delta[token]) + (decay * after if token < len(goes_on) and goes_on[token] else 0.0)
        raw[token] = after
    return TokenAdvantages(_whitened(raw) if whiten else raw, raw + values)


def _whitened(advantages: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean 0 and variance 1 (ddof = 1); a single token gets 0."""
    if len(advantages) < 2:
        return np.zeros(len(advantages))
    whitened: NDArray[np.float64] = (advantages - advantages.mean()) / (advantages.std(ddof=1) + EPSILON)
    return whitened
