from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.train.losses import KLS
from stepgym.train.losses.kl import k1, k2, k3

PROBABILITIES = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4)


def test_kl_estimators_by_hand() -> None:
    logprob = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64)).requires_grad_()
    reference = torch.log(torch.tensor([0.25, 0.5], dtype=torch.float64))
    log2 = math.log(2)
    values = {"k1": log2, "k2": log2**2 / 2, "k3": 0.5 - 1 + log2}
    gradients = {"k1": 1.0, "k2": log2, "k3": 1 - 0.5}
    for name in KLS:
        value = KLS.get(name)(logprob, reference)
        assert value.tolist() == pytest.approx([values[name], 0.0])
        (slope,) = torch.autograd.grad(value[0], logprob)
        assert slope[0].item() == pytest.approx(gradients[name])


def distributions(p: list[float], q: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.log(torch.tensor(p, dtype=torch.float64)).requires_grad_()
    reference = torch.log_softmax(torch.log(torch.tensor(q, dtype=torch.float64)), -1)
    return logits, torch.log_softmax(logits, -1), reference


def slope_of(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(value, logits, retain_graph=True)
    return slope


@given(PROBABILITIES, PROBABILITIES)
def test_in_the_loss_k2_has_the_gradient_of_the_divergence_and_k3_that_of_the_other_one(
    p: list[float], q: list[float]
) -> None:
    logits, policy, reference = distributions(p, q)
    weight = policy.exp().detach()
    exact = (policy.exp() * (policy - reference)).sum()
    other = (reference.exp() * (reference - policy)).sum()
    for estimator in (k1, k3):
        assert (weight * estimator(policy, reference)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    in_loss = {name: slope_of((weight * KLS.get(name)(policy, reference)).sum(), logits) for name in KLS}
    assert torch.allclose(in_loss["k1"], torch.zeros_like(logits), atol=1e-9)
    assert torch.allclose(in_loss["k2"], slope_of(exact, logits), atol=1e-9)
    assert torch.allclose(in_loss["k3"], slope_of(other, logits), atol=1e-9)


@given(PROBABILITIES, PROBABILITIES)
def test_in_the_reward_k1_has_the_gradient_of_the_divergence_and_k3_next_to_none(
    p: list[float], q: list[float]
) -> None:
    logits, policy, reference = distributions(p, q)
    weight = policy.exp().detach()
    exact = slope_of((policy.exp() * (policy - reference)).sum(), logits)
    other = slope_of((reference.exp() * (reference - policy)).sum(), logits)
    # The policy gradient with the estimator as a cost: E[k * d log pi].
    in_reward = {
        name: slope_of((weight * KLS.get(name)(policy, reference).detach() * policy).sum(), logits) for name in KLS
    }
    assert torch.allclose(in_reward["k1"], exact, atol=1e-9)
    assert torch.allclose(in_reward["k3"], exact - other, atol=1e-9)


def test_k3_of_a_token_the_policy_all_but_forbids_is_finite_and_never_pushes_it_away() -> None:
    logprob = torch.tensor([-1e4, -15.0], requires_grad=True)
    value = k3(logprob, torch.tensor([-1.0, -1.0]))
    assert torch.isfinite(value).all()
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert slope[0] == 0
    assert slope[1] < 0


def test_k2_is_symmetric_and_k1_is_not() -> None:
    a, b = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert k2(a, b).item() == k2(b, a).item() == 2.0
    assert (k1(a, b).item(), k1(b, a).item()) == (2.0, -2.0)
