"""From a loss per token to one number: the weight of each token.

The weights are taken over a whole update (an optimizer step), so how it is cut into micro-batches changes nothing. A
unit without a trained token is not counted.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

Reduction: TypeAlias = Literal["token", "step", "trajectory", "group", "constant"]


class ReductionConfig(BaseModel):
    """What the loss is a mean over: a name, or `{kind: constant, tokens: 1024}`.

    Attributes:
        kind: `token`, `step`, `trajectory`, `group` or `constant` (see `token_weights`).
        tokens: With `constant`, the number that the sum over a trajectory's tokens is divided by: the most tokens that
            one can have, say (turns times response limit). A smaller number is a larger step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Reduction = "trajectory"
    tokens: int | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _used(self) -> ReductionConfig:
        if self.kind == "constant" and self.tokens is None:
            raise ValueError("kind 'constant' needs 'tokens', the number that a trajectory's sum is divided by")
        if self.kind != "constant" and self.tokens is not None:
            raise ValueError(f"'tokens' has no effect with kind {self.kind!r}; it belongs to 'constant'")
        return self

    def weights(
        self, *, step: NDArray[np.int64], trajectory: NDArray[np.int64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The weight of each token: `token_weights` with these settings."""
        return token_weights(self.kind, step=step, trajectory=trajectory, group=group, tokens=self.tokens)


def token_weights(
    reduction: Reduction,
    *,
    step: NDArray[np.int64],
    trajectory: NDArray[np.int64],
    group: NDArray[np.int64],
    tokens: int | None = None,
) -> NDArray[np.float64]:
    """Weight of each trained token of an update; the loss is the sum of weight * loss per token.

    `token` weighs all tokens alike: the sum over all tokens divided by their number (DAPO, arXiv:2503.14476). `step`,
    `trajectory` and `group` take the mean over the tokens of each unit, then the mean over units; `trajectory` is
    GRPO's (arXiv:2402.03300) for trajectories of many turns. `constant` divides the sum over a trajectory's tokens by
    the same number for every trajectory, then takes the mean over trajectories: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783), where a long answer is not punished less for each of its tokens than a short one.

    Args:
        reduction: `token`, `step`, `trajectory`, `group` or `constant`.
        step, trajectory, group: int64 arrays [M], the unit that each trained token belongs to.
        tokens: The divisor of `constant`.

    Returns:
        float64 array [M] that sums to 1 (empty for no tokens); with `constant` to the mean number of trained tokens of
        a trajectory divided by `tokens`.

    Raises:
        ValueError: `constant` without `tokens`.
    """
    count = len(step)
    if not count:
        return np.zeros(0)
    if reduction == "token":
        return np.full(count, 1.0 / count)
    if reduction == "constant":
        if tokens is None:
            raise ValueError("the reduction 'constant' needs a number of tokens")
        return np.full(count, 1.0 / (len(np.unique(trajectory)) * tokens))
    unit = {"step": step, "trajectory": trajectory, "group": group}[reduction]
    _, inverse, sizes = np.unique(unit, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (len(sizes) * sizes[inverse]), dtype=np.float64)
