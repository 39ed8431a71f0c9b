"""From a loss per token to one number: the weight of each token.

The weights are taken over a whole update (an optimizer step), so how it is cut into micro-batches changes nothing.
They sum to 1. A unit without a trained token is not counted.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Reduction: TypeAlias = Literal["token", "step", "trajectory", "group"]


def token_weights(
    reduction: Reduction,
    *,
    step: NDArray[np.int64],
    trajectory: NDArray[np.int64],
    group: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Weight of each trained token of an update; the loss is the sum of weight * loss per token.

    `token` weighs all tokens alike: the sum over all tokens divided by their number (DAPO, arXiv:2503.14476). `step`,
    `trajectory` and `group` take the mean over the tokens of each unit, then the mean over units; `trajectory` is
    GRPO's (arXiv:2402.03300) for trajectories of many turns.

    Args:
        reduction: `token`, `step`, `trajectory` or `group`.
        step, trajectory, group: int64 arrays [M], the unit that each trained token belongs to.

    Returns:
        float64 array [M] that sums to 1 (empty for no tokens).
    """
    count = len(step)
    if reduction == "token":
        return np.full(count, 1.0 / max(count, 1))
    unit = {"step": step, "trajectory": trajectory, "group": group}[reduction]
    _, inverse, sizes = np.unique(unit, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(sizes) * sizes[inverse]), dtype=np.float64) if count else np.zeros(0)
