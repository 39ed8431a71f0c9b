from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.config import validate_kwargs
from stepgym.errors import UserError
from stepgym.plugins import Registry
from stepgym.train.corrections import CORRECTIONS
from stepgym.train.corrections.truncated import truncated
from stepgym.train.losses import KLS, LOSSES
from stepgym.train.losses.cross_entropy import cross_entropy
from stepgym.train.losses.kl import k1, k2, k3
from stepgym.train.losses.ppo import ppo
from stepgym.train.losses.reduction import token_weights
from stepgym.train.losses.tokens import TokenLoss, Tokens


def tokens_of(ratio: list[float], advantage: list[float]) -> Tokens:
    old = torch.full((len(ratio),), -1.0, dtype=torch.float64)
    logprob = (old + torch.log(torch.tensor(ratio, dtype=torch.float64))).requires_grad_()
    unit = torch.zeros(len(ratio), dtype=torch.int64)
    return Tokens(logprob, old, torch.tensor(advantage, dtype=torch.float64), unit, unit, unit, old)


def slopes(tokens: Tokens, loss: TokenLoss) -> list[float]:
    (slope,) = torch.autograd.grad(loss.values.sum(), tokens.logprob)
    return slope.tolist()


def test_ppo_by_hand() -> None:
    #                  inside, above, below, inside, above, below
    tokens = tokens_of([1.1, 1.5, 0.5, 1.1, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    loss = ppo(tokens, clip_low=0.2, clip_high=0.3)
    assert loss.values.tolist() == pytest.approx([-2.2, -2.6, -1.0, 2.2, 3.0, 1.6])
    # The gradient is -ratio * A where the clip does not hold, else 0.
    assert slopes(tokens, loss) == pytest.approx([-2.2, 0.0, -1.0, 2.2, 3.0, 0.0])
    assert loss.metrics["clip_fraction_high"].tolist() == [False, True, False, False, False, False]
    assert loss.metrics["clip_fraction_low"].tolist() == [False, False, False, False, False, True]
    assert loss.metrics["ratio"].tolist() == pytest.approx([1.1, 1.5, 0.5, 1.1, 1.5, 0.5])


def test_clip_higher_lets_good_tokens_rise_further_and_changes_nothing_else() -> None:
    tokens = tokens_of([1.25, 1.25, 0.5], [1.0, -1.0, -1.0])
    narrow, wide = ppo(tokens), ppo(tokens, clip_high=0.28)
    assert narrow.values.tolist() == pytest.approx([-1.2, 1.25, 0.8])
    assert wide.values.tolist() == pytest.approx([-1.25, 1.25, 0.8])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    tokens = tokens_of([10.0, 10.0, 2.0], [-1.0, 1.0, -1.0])
    loss = ppo(tokens, dual_clip=3.0)
    assert loss.values.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert slopes(tokens, loss) == pytest.approx([0.0, 0.0, 2.0])
    assert loss.metrics["clip_fraction_dual"].tolist() == [True, False, False]


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    tokens = tokens_of([1.0], [-1.0])
    far = Tokens(
        tokens.logprob + 1000,
        tokens.old_logprob,
        tokens.advantage,
        tokens.step,
        tokens.step,
        tokens.step,
        tokens.sampler_logprob,
    )
    assert torch.isfinite(ppo(far).values).all()


@pytest.mark.parametrize(
    "options", [{"clip_low": 0.0}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"clip": 0.2}]
)
def test_ppo_refuses_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="loss"):
        validate_kwargs(LOSSES.get("ppo"), options, "loss")


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


@given(st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4), st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
def test_in_expectation_k1_and_k3_are_the_divergence_and_k2_has_its_gradient(p: list[float], q: list[float]) -> None:
    logits = torch.log(torch.tensor(p, dtype=torch.float64)).requires_grad_()
    policy = torch.log_softmax(logits, -1)
    reference = torch.log_softmax(torch.log(torch.tensor(q, dtype=torch.float64)), -1)
    weight = policy.exp().detach()
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        assert (weight * estimator(policy, reference)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((weight * k2(policy, reference)).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((weight * k1(policy, reference)).sum(), logits)
    assert torch.allclose(of_k2, slope, atol=1e-9)
    assert torch.allclose(of_k1, torch.zeros_like(of_k1), atol=1e-9)


def test_k3_of_a_token_the_policy_all_but_forbids_stays_finite() -> None:
    assert torch.isfinite(k3(torch.tensor([-1e4]), torch.tensor([-1.0]))).all()


def test_truncated_importance_weights_by_hand() -> None:
    tokens = tokens_of([1.7, 1.7, 1.7], [1.0, 1.0, 1.0])  # the current ratio plays no part
    sampler = tokens.old_logprob - torch.log(torch.tensor([0.5, 1.5, 5.0], dtype=torch.float64))
    correction = truncated(dataclasses.replace(tokens, sampler_logprob=sampler), cap=2.0)
    assert correction.values.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert not correction.values.requires_grad
    assert correction.metrics["importance_truncated"].tolist() == [False, False, True]


def test_a_token_the_sampler_thought_impossible_gets_the_cap() -> None:
    tokens = tokens_of([1.0], [1.0])
    impossible = dataclasses.replace(tokens, sampler_logprob=torch.tensor([-math.inf]))
    assert truncated(impossible, cap=2.0).values.tolist() == [2.0]


def test_cross_entropy_is_the_negative_log_likelihood() -> None:
    assert cross_entropy(torch.log(torch.tensor([0.5, 1.0]))).tolist() == pytest.approx([math.log(2), 0.0])


def test_reductions_by_hand() -> None:
    # Group 0: trajectory 0 with steps of 1 and 3 tokens. Group 1: trajectories 1 and 2 with steps of 2 and 2 tokens.
    step = np.array([0, 1, 1, 1, 2, 2, 3, 3])
    trajectory = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    group = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    units = {"step": step, "trajectory": trajectory, "group": group}
    assert token_weights("token", **units) == pytest.approx([1 / 8] * 8)
    assert token_weights("step", **units) == pytest.approx([1 / 4, *[1 / 12] * 3, *[1 / 8] * 4])
    assert token_weights("trajectory", **units) == pytest.approx([*[1 / 12] * 4, *[1 / 6] * 4])
    assert token_weights("group", **units) == pytest.approx([1 / 8] * 8)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_weights_sum_to_one_and_units_weigh_alike(places: list[tuple[int, int, int]]) -> None:
    names = ("group", "trajectory", "step")
    numbers: list[dict[tuple[int, ...], int]] = [{}, {}, {}]
    units = {
        name: np.array([known.setdefault(p[: depth + 1], len(known)) for p in places], dtype=np.int64)
        for depth, (name, known) in enumerate(zip(names, numbers, strict=True))
    }
    for name in ("token", "step", "trajectory", "group"):
        weights = token_weights(name, **units)
        assert weights.sum() == pytest.approx(1.0 if places else 0.0)
        if name != "token" and places:
            totals = np.bincount(units[name], weights)
            assert totals == pytest.approx(np.full(len(totals), 1 / len(totals)))


def test_registries_know_their_entries_and_suggest() -> None:
    assert (LOSSES.names(), KLS.names(), CORRECTIONS.names()) == (["ppo"], ["k1", "k2", "k3"], ["truncated"])
    with pytest.raises(UserError, match=r"unknown loss 'pppo'; did you mean 'ppo'\?"):
        LOSSES.get("pppo")


def test_user_code_adds_a_loss_with_a_decorator() -> None:
    registry: Registry[object] = Registry("loss", {})

    @registry.register("reinforce")
    def reinforce(tokens: Tokens) -> TokenLoss:
        return TokenLoss(-tokens.advantage * tokens.logprob)

    assert registry.get("reinforce") is reinforce
