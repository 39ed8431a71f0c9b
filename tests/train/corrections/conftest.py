from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from stepgym.train.losses.tokens import Tokens


def make_tokens(
    ratio: Sequence[float],
    *,
    step: Sequence[int] | None = None,
    trajectory: Sequence[int] | None = None,
    advantage: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tokens:
    """Tokens with given ratios pi_old / mu (NaN: mu unknown; inf: mu = 0; 0: pi_old = 0)."""
    count = len(ratio)
    wanted = torch.tensor(ratio, dtype=dtype)
    old = torch.where(wanted == 0, -torch.inf, torch.full((count,), -1.0, dtype=dtype))
    sampler = torch.where(wanted == 0, -1.0, -1.0 - torch.log(wanted))
    one = torch.zeros(count, dtype=torch.int64)
    return Tokens(
        logprob=old,
        old_logprob=old,
        advantage=torch.ones(count, dtype=dtype) if advantage is None else torch.tensor(advantage, dtype=dtype),
        step=one if step is None else torch.tensor(step),
        trajectory=one if trajectory is None else torch.tensor(trajectory),
        group=one,
        sampler_logprob=sampler,
    )


@pytest.fixture
def tokens_of() -> Callable[..., Tokens]:
    """`tokens_of(ratio, step=, trajectory=, advantage=, dtype=) -> Tokens`."""
    return make_tokens
