from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from stepgym.train.losses.tokens import TokenLoss, Tokens


def make_tokens(
    ratio: Sequence[float],
    advantage: Sequence[float],
    *,
    step: Sequence[int] | None = None,
    trajectory: Sequence[int] | None = None,
    old: Sequence[float] | float = -1.0,
    dtype: torch.dtype = torch.float64,
) -> Tokens:
    """Tokens with given ratios pi / pi_old; one step, one trajectory and one group unless said otherwise."""
    count = len(ratio)
    before = torch.full((count,), float(old), dtype=dtype) if isinstance(old, float) else torch.tensor(old, dtype=dtype)
    logprob = (before + torch.log(torch.tensor(ratio, dtype=dtype))).requires_grad_()
    one = torch.zeros(count, dtype=torch.int64)
    return Tokens(
        logprob=logprob,
        old_logprob=before,
        advantage=torch.tensor(advantage, dtype=dtype),
        step=one if step is None else torch.tensor(step),
        trajectory=one if trajectory is None else torch.tensor(trajectory),
        group=one,
        sampler_logprob=before,
    )


@pytest.fixture
def tokens_of() -> Callable[..., Tokens]:
    """`tokens_of(ratio, advantage, step=, trajectory=, old=, dtype=) -> Tokens`."""
    return make_tokens


@pytest.fixture
def slopes() -> Callable[..., list[float]]:
    """`slopes(tokens, loss) -> list`: derivative of the sum of a loss by each log-probability."""

    def of(tokens: Tokens, loss: TokenLoss, weight: torch.Tensor | None = None) -> list[float]:
        total = (loss.values if weight is None else loss.values * weight).sum()
        (slope,) = torch.autograd.grad(total, tokens.logprob)
        return list(slope.tolist())

    return of
