"""Every loss, on inputs that nothing should bring out of order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.train.losses import LOSSES
from stepgym.train.losses.tokens import TokenLoss, Tokens

NAMES = LOSSES.names()
CALLS = [(name, {}) for name in NAMES] + [("gspo", {"unit": "trajectory"}), ("ppo", {"dual_clip": 3.0})]
LOGPROB = st.floats(-1e4, 0.0, width=32)


@st.composite
def batches(draw: Any) -> list[tuple[float, float, float, int]]:
    token = st.tuples(LOGPROB, LOGPROB, st.floats(-100, 100, width=32), st.integers(0, 3))
    return draw(st.lists(token, max_size=12))


def made(rows: list[tuple[float, float, float, int]], dtype: torch.dtype) -> Tokens:
    logprob = torch.tensor([row[0] for row in rows], dtype=dtype, requires_grad=True)
    old = torch.tensor([row[1] for row in rows], dtype=dtype)
    advantage = torch.tensor([row[2] for row in rows], dtype=dtype)
    step = torch.tensor([row[3] for row in rows], dtype=torch.int64)
    return Tokens(logprob, old, advantage, step, step // 2, step // 4, torch.full_like(old, torch.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CALLS)
@settings(max_examples=40, deadline=None)
@given(rows=batches())
def test_values_and_gradients_are_finite_and_of_the_type_given(
    name: str, options: dict[str, Any], dtype: torch.dtype, rows: list[tuple[float, float, float, int]]
) -> None:
    tokens = made(rows, dtype)
    loss: TokenLoss = LOSSES.get(name)(tokens, **options)
    assert loss.values.shape == tokens.logprob.shape
    assert loss.values.dtype == dtype
    assert torch.isfinite(loss.values).all()
    if rows:
        (slope,) = torch.autograd.grad(loss.values.sum(), tokens.logprob)
        assert torch.isfinite(slope).all()
    for metric in loss.metrics.values():
        assert metric.shape == tokens.logprob.shape
        assert not metric.requires_grad
        assert torch.isfinite(metric.double()).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gspo", "cispo")])
def test_gradients_are_those_of_the_values(name: str) -> None:
    # gspo and cispo hold something fixed on purpose; their gradients are checked against the papers' own forms.
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    logprob = (-1 + 0.2 * rows[0]).requires_grad_()
    old = -1 + 0.2 * rows[1]
    step = torch.arange(20) % 5

    def values(logprob: torch.Tensor) -> torch.Tensor:
        tokens = Tokens(logprob, old, rows[2], step, step // 2, step // 4, old)
        found: torch.Tensor = LOSSES.get(name)(tokens).values
        return found

    assert torch.autograd.gradcheck(values, (logprob,))
