"""Losses, corrections, the KL and the reduction put together by the learner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.trajectory import Trajectory
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.losses.tokens import TokenLoss, Tokens, TokenWeights, couples
from stepgym.train.mini_batch import MiniBatch


def batch(make: SimpleNamespace) -> list[Trajectory]:
    return [*make.group(1, [1.0, 0.0, 0.5, -1.0], task="one"), *make.group(2, [0.0, 1.0, 0.0], task="two", breaks=(1,))]


def first_gradient(make: SimpleNamespace, **config: Any) -> tuple[torch.Tensor, MiniBatch, dict[str, float]]:
    """Gradient of the first update, its mini-batch and its metrics."""
    policy = make.policy(dtype="float64")
    learner = Learner(policy, LearnerConfig(**config), make.policy(seed=9, dtype="float64"))
    (mini,), _ = learner.prepare(treat(batch(make), OutcomePolicy())[0])
    policy.model.zero_grad()
    metrics = learner.backward(mini).means()
    return make.gradient(policy), mini, metrics


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding: transformers normalises in float32 whatever the type of the weights."""
    return float((one - other).norm()) < 1e-5 * float(other.norm())


@pytest.mark.parametrize("correction", ["truncated", {"kind": "sequence_truncated", "cap": 1.3}, "none"])
def test_the_first_update_is_the_same_whether_pi_old_was_computed_before_or_with_it(
    make: SimpleNamespace, correction: Any
) -> None:
    settings = {"correction": correction, "kl": {"kind": "k3", "coef": 0.5}}
    once, mini, _ = first_gradient(make, **settings)
    assert mini.old_logprob is None
    before, mini, _ = first_gradient(make, **settings, epochs=2)
    assert mini.old_logprob is not None
    assert close(once, before)


def test_the_correction_weighs_the_loss_and_not_the_kl(make: SimpleNamespace) -> None:
    kl = {"kind": "k3", "coef": 0.5}
    whole, _, metrics = first_gradient(make, correction={"kind": "truncated", "cap": 0.1}, kl=kl)
    assert metrics["importance_weight"] == pytest.approx(0.1, rel=0.05)  # nearly all ratios are above the cap
    of_loss, _, _ = first_gradient(make, correction={"kind": "truncated", "cap": 0.1})
    of_both, _, _ = first_gradient(make, correction="none", kl=kl)
    of_loss_alone, _, _ = first_gradient(make, correction="none")
    assert close(whole - of_loss, of_both - of_loss_alone)


def test_what_a_correction_masks_leaves_the_denominator(make: SimpleNamespace) -> None:
    correction = {"kind": "masked", "low": 0.8, "high": 1.3, "weigh": False}
    gradient, mini, metrics = first_gradient(make, correction=correction, reduction="token", loss="reinforce")
    share = metrics["importance_masked"]
    assert 0.1 < share < 0.9
    assert mini.weight is not None
    kept = mini.weight > 0
    assert int((~kept).sum()) == round(share * len(mini))
    assert mini.weight[kept].tolist() == pytest.approx([1 / int(kept.sum())] * int(kept.sum()))

    # The same by hand: the policy gradient of the tokens that are left, divided by their number.
    policy = make.policy(dtype="float64")
    learner = Learner(policy, LearnerConfig(reduction="token", loss="reinforce", correction="none"))
    (plain,), _ = learner.prepare(treat(batch(make), OutcomePolicy())[0])
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in plain.micro_batches:
        left = kept[micro_batch.token]
        scores = policy.score(micro_batch)
        assert plain.advantage is not None
        total = total - (plain.advantage[micro_batch.token] * scores.logprob)[left].sum() / int(kept.sum())
    policy.model.zero_grad()
    total.backward()
    assert close(gradient, make.gradient(policy))


def test_a_mini_batch_of_which_nothing_is_left_makes_no_update(make: SimpleNamespace) -> None:
    policy = make.policy()
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    correction = {"kind": "masked", "low": 0.9999999, "high": 1.0000001}
    report = Learner(policy, LearnerConfig(correction=correction)).update(batch(make))
    assert (report.updates, report.metrics["skipped_updates"]) == (0, 1)
    assert all(torch.equal(one, other) for one, other in zip(before, policy.model.parameters(), strict=True))


def test_constant_divides_by_what_it_is_told_and_by_nothing_else(make: SimpleNamespace) -> None:
    gradients = {}
    for tokens in (100, 200):
        reduction = {"kind": "constant", "tokens": tokens}
        gradients[tokens], _, _ = first_gradient(make, credit="dr_grpo", reduction=reduction, correction="none")
    assert close(gradients[100], 2 * gradients[200])
    by_token, mini, _ = first_gradient(make, credit="dr_grpo", reduction="token", correction="none")
    share = len(mini) / (100 * 7)  # seven trajectories
    assert close(gradients[100], share * by_token)


def mean_loss(tokens: Tokens) -> TokenLoss:
    return TokenLoss(-(tokens.advantage * tokens.logprob).mean())


def one_metric(tokens: Tokens) -> TokenLoss:
    return TokenLoss(-tokens.advantage * tokens.logprob, {"largest": tokens.logprob.detach().amax(0, keepdim=True)})


def one_weight(tokens: Tokens) -> TokenWeights:
    return TokenWeights(torch.ones(1))


@couples("token")
def keeps_at_times(tokens: Tokens) -> TokenWeights:
    keep = tokens.logprob > -4.0
    return TokenWeights(keep.double(), None if keep.all() else keep)


@couples("token")
def needs_tokens(tokens: Tokens) -> TokenWeights:
    keep = tokens.old_logprob >= tokens.old_logprob.max()  # of no tokens there is no maximum
    return TokenWeights(keep.double(), keep)


@pytest.mark.parametrize("declared", [couples("token"), couples("batch")])
def test_a_function_that_does_not_return_one_number_per_token_is_named(make: SimpleNamespace, declared: Any) -> None:
    for field, function, said in (
        (
            "loss",
            mean_loss,
            r"loss mean_loss: 'values' has shape \[\] for \d+ tokens; it must have one entry per token",
        ),
        ("loss", one_metric, r"loss one_metric: 'largest' has shape \[1\] for \d+ tokens"),
        ("correction", one_weight, r"correction one_weight: 'values' has shape \[1\] for \d+ tokens"),
    ):
        declared(function)
        with pytest.raises(UserError, match=said):
            first_gradient(make, **{field: f"{__name__}:{function.__name__}"})


def test_a_correction_that_masks_only_at_times_is_refused_and_one_that_needs_tokens_is_not(
    make: SimpleNamespace,
) -> None:
    with pytest.raises(UserError, match=r"keeps_at_times' leaves out tokens now .* must return `keep` always or never"):
        first_gradient(make, correction=f"{__name__}:keeps_at_times")
    _, mini, _ = first_gradient(make, correction=f"{__name__}:needs_tokens")
    assert mini.weight is not None
    assert int((mini.weight > 0).sum()) == 1
    assert float(mini.weight.sum()) == pytest.approx(1.0)
