from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.train.losses.sapo import sapo
from stepgym.train.losses.tokens import Tokens


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sapo_by_hand(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.0, 2.0, 1.0, 0.5], [3.0, 3.0, -3.0, -3.0])
    loss = sapo(tokens, tau_positive=1.0, tau_negative=2.0)
    expected = [-4 * 0.5 * 3, -4 * sigmoid(1) * 3, 2 * 0.5 * 3, 2 * sigmoid(-1) * 3]
    assert loss.values.tolist() == pytest.approx(expected)
    closing = 4 * sigmoid(1) * sigmoid(-1)  # the same on both sides: tau * (ratio - 1) is 1 and -1
    assert slopes(tokens, loss) == pytest.approx([-3.0, -3 * 2 * closing, 3.0, 3 * 0.5 * closing])
    assert loss.metrics["gate_weight"].tolist() == pytest.approx([1.0, closing, 1.0, closing])


@given(st.floats(0.01, 20), st.floats(0.1, 5))
def test_the_gradient_on_policy_is_the_advantage_whatever_tau(advantage: float, tau: float) -> None:
    one = torch.zeros(2, dtype=torch.int64)
    logprob = torch.full((2,), -1.5, dtype=torch.float64, requires_grad=True)
    signed = torch.tensor([advantage, -advantage], dtype=torch.float64)
    tokens = Tokens(logprob, logprob.detach(), signed, one, one, one, logprob.detach())
    loss = sapo(tokens, tau_positive=tau, tau_negative=tau)
    (slope,) = torch.autograd.grad(loss.values.sum(), logprob)
    assert slope.tolist() == pytest.approx([-advantage, advantage])


def test_bad_tokens_fade_sooner_by_default(tokens_of: Any) -> None:
    loss = sapo(tokens_of([1.5, 1.5], [1.0, -1.0]))
    good, bad = loss.metrics["gate_weight"].tolist()
    assert good == pytest.approx(4 * sigmoid(0.5) * sigmoid(-0.5))
    assert bad == pytest.approx(4 * sigmoid(0.525) * sigmoid(-0.525))
    assert bad < good
