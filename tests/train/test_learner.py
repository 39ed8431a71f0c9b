from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.record.trajectory import Trajectory
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.losses import LOSSES
from stepgym.train.losses.tokens import TokenLoss, Tokens
from stepgym.train.policy import Policy


def own_logprobs(policy: Policy, made: list[Trajectory], shift: float = 0.0) -> list[Trajectory]:
    """The same trajectories with the log-probabilities that the policy itself gives, plus `shift`."""
    result = []
    for trajectory in made:
        steps = []
        for step in trajectory.steps:
            ids = torch.from_numpy(step.full_ids.astype("int64"))
            with torch.no_grad():
                table = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0], -1)
            start = len(step.prompt_ids)
            logprobs = table[torch.arange(start - 1, len(ids) - 1), ids[start:]] + shift
            steps.append(replace(step, logprobs=logprobs.numpy()))
        result.append(replace(trajectory, steps=steps))
    return result


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def test_the_first_gradient_is_that_of_the_policy_gradient_by_hand(make: SimpleNamespace) -> None:
    policy = make.policy(dtype="float64")
    made = own_logprobs(policy, make.group(1, [1.0, 0.0], turns=(2, 1)))
    learner = Learner(policy, LearnerConfig(reduction="token", credit="rloo"))
    (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
    learner.backward(mini)
    found = make.gradient(policy)
    policy.model.zero_grad()
    total, count = torch.zeros(()), 0
    for trajectory, advantage in zip(made, (1.0, -1.0), strict=True):
        for step in trajectory.steps:
            ids = torch.from_numpy(step.full_ids.astype("int64"))
            table = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0], -1)
            start = len(step.prompt_ids)
            total = total - advantage * table[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum()
            count += len(step.response_ids)
    (total / count).backward()
    expected = make.gradient(policy)
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_updates_make_rewarded_responses_likelier(make: SimpleNamespace) -> None:
    policy = make.policy()
    made = own_logprobs(policy, make.group(1, [1.0, 0.0, 1.0, 0.0]))
    config = LearnerConfig(optimizer={"learning_rate": 1e-3}, correction="none")
    learner = Learner(policy, config)
    (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
    before = policy.logprobs(mini.micro_batches, len(mini.batch.tokens))
    for _ in range(5):
        learner.update(made)
    change = policy.logprobs(mini.micro_batches, len(mini.batch.tokens)) - before
    assert change[mini.advantage > 0].mean() > 0.05
    assert change[mini.advantage < 0].mean() < -0.05


def test_metrics_by_hand(make: SimpleNamespace) -> None:
    policy = make.policy()
    made = own_logprobs(policy, make.group(1, [1.0, 0.0, 0.5], turns=(2, 1, 3)), shift=-math.log(1.5))
    made += make.group(2, [1.0, 1.0], task="equal")
    made.append(make.trajectory(1, sample=7, outcome=Outcome.CONTEXT_OVERFLOW, reward=0.0))
    made.append(make.trajectory(1, sample=8, outcome=Outcome.ENV_ERROR, reward=None))
    made.append(make.trajectory(1, sample=9, outcome=Outcome.ENV_ERROR, reward=None, final=False))
    report = Learner(policy, LearnerConfig(optimizer={"learning_rate": 1e-3, "warmup_updates": 3})).update(made)
    metrics = report.metrics
    tokens = sum(len(step.response_ids) for t in made[:3] for step in t.steps)
    assert metrics["reward_mean"] == pytest.approx(3.5 / 5)
    assert metrics["success"] == pytest.approx(4 / 5)
    assert (metrics["groups"], metrics["members"], metrics["zero_variance_groups"]) == (2, 5, 1)
    assert (metrics["masked"], metrics["masked/context_overflow"]) == (1, 1)
    assert (metrics["dropped"], metrics["dropped/env_error"]) == (1, 1)
    assert (metrics["tokens_trained"], metrics["steps"], metrics["sequences"]) == (tokens, 6, 3)
    assert metrics["merge_ratio"] == 2.0
    # The prompt, 7 tokens, stands once; a last token need not be read.
    unique = 7 + sum(t.steps[-1].length - 7 - 1 for t in made[:3])
    assert metrics["tokens_unique"] == metrics["tokens_forward"] == unique
    assert metrics["micro_batches"] == 1
    assert metrics["tokens_steps"] == sum(step.length for t in made[:3] for step in t.steps)
    assert metrics["logprob_gap_mean"] == pytest.approx(math.log(1.5), abs=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(1.5), abs=1e-4)
    assert metrics["importance_weight"] == pytest.approx(1.5, abs=1e-3)
    assert metrics["importance_truncated"] == 0.0
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.0
    assert 0 < metrics["entropy"] <= math.log(89)
    assert metrics["grad_norm"] > 0
    assert metrics["learning_rate"] == pytest.approx(2.5e-4)
    assert (metrics["update"], metrics["updates"], report.updates) == (1, 1, 1)
    assert report.to_dict()["outcomes"]["kept"] == {"completed": 5}


def test_importance_weights_are_cut_at_the_cap(make: SimpleNamespace) -> None:
    policy = make.policy()
    made = own_logprobs(policy, make.group(1, [1.0, 0.0]), shift=-2.0)
    for correction, weight in (("truncated", 2.0), ({"kind": "truncated", "cap": 5.0}, 5.0)):
        metrics = Learner(make.policy(), LearnerConfig(correction=correction)).update(made).metrics
        assert metrics["importance_weight"] == pytest.approx(weight)
        assert metrics["importance_truncated"] == 1.0


def test_one_update_a_batch_needs_no_pass_for_the_old_logprobs_and_is_the_same(make: SimpleNamespace) -> None:
    made = make.group(1, [1.0, 0.0, 0.5])
    gradients = []
    for config in ({}, {"correction": "masked", "epochs": 2}, {"epochs": 2}):
        policy = make.policy()
        learner = Learner(policy, LearnerConfig(**{"correction": "truncated", **config}))
        (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
        assert (mini.old_logprob is not None) == bool(config)
        learner.backward(mini)
        gradients.append(make.gradient(policy))
    assert torch.allclose(gradients[0], gradients[2], rtol=1e-4, atol=1e-7)
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-2)


def test_in_later_epochs_ratios_leave_one_and_clip(make: SimpleNamespace) -> None:
    config = LearnerConfig(
        epochs=6, optimizer={"learning_rate": 5e-3}, loss={"kind": "ppo", "clip_low": 0.1, "clip_high": 0.1}
    )
    metrics = Learner(make.policy(), config).update(make.group(1, [1.0, 0.0, 0.5])).metrics
    assert metrics["updates"] == 6
    assert metrics["ratio_max"] > 1.1
    assert metrics["clip_fraction_low"] > 0
    assert metrics["clip_fraction_high"] > 0


def test_the_kl_term_is_zero_at_the_reference_and_pulls_back_to_it(make: SimpleNamespace) -> None:
    made = make.group(1, [1.0, 0.0, 0.5])
    distances = {}
    for coef in (0.0, 10.0):
        policy = make.policy()
        config = LearnerConfig(kl={"kind": "k3", "coef": coef}, optimizer={"learning_rate": 1e-3}, correction="none")
        learner = Learner(policy, config)
        assert learner.reference is not None
        kl = [learner.update(made).metrics["kl"] for _ in range(8)]
        assert kl[0] == pytest.approx(0.0, abs=1e-6)
        distances[coef] = kl[-1]
    assert 0 < distances[10.0] < 0.7 * distances[0.0]


def test_zero_variance_groups_can_be_kept_for_the_sake_of_the_kl_term(make: SimpleNamespace) -> None:
    made = make.group(1, [1.0, 1.0])
    for choice, updates in (("drop", 0), ("keep", 1)):
        config = LearnerConfig(zero_variance=choice, kl="k3")
        report = Learner(make.policy(), config, reference=make.policy(seed=5)).update(made)
        assert (report.updates, report.metrics["zero_variance_groups"]) == (updates, 1)


def test_a_batch_without_anything_to_learn_changes_nothing(make: SimpleNamespace) -> None:
    policy = make.policy()
    before = weights(policy)
    learner = Learner(policy, LearnerConfig(optimizer={"weight_decay": 0.1}))
    for made in ([], make.group(1, [1.0, 1.0]), [make.trajectory(outcome=Outcome.ENGINE_ERROR, reward=None)]):
        report = learner.update(made)
        assert report.updates == 0
        assert "loss" not in report.metrics
    assert torch.equal(weights(policy), before)
    assert (learner.updates, learner.batches) == (0, 3)


def test_equal_seeds_and_any_order_of_arrival_give_equal_weights(make: SimpleNamespace) -> None:
    made = [t for g in range(4) for t in make.group(g, [1.0, 0.0, 0.5], task=f"task {g}")]
    results = []
    for order, seed in ((made, 0), (made[::-1], 0), (made, 1)):
        policy = make.policy()
        learner = Learner(policy, LearnerConfig(mini_batches=2, seed=seed, optimizer={"learning_rate": 1e-3}))
        for _ in range(2):
            learner.update(order)
        results.append(weights(policy))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sampler": "scripted", "logprobs": None}, "it is scripted"), ({"logprobs": None}, "it has no logprobs")],
)
def test_records_that_cannot_be_trained_on_are_refused_before_anything_moves(
    make: SimpleNamespace, change: dict[str, Any], message: str
) -> None:
    policy = make.policy()
    made = make.group(1, [1.0, 0.0])
    made[1] = replace(made[1], steps=[replace(step, **change) for step in made[1].steps])
    before = weights(policy)
    with pytest.raises(UserError, match=f"sample|trajectory train/0/task/1/0, step 0 cannot be trained on: {message}"):
        Learner(policy, LearnerConfig()).update(made)
    assert torch.equal(weights(policy), before)


def not_finite(tokens: Tokens) -> TokenLoss:
    return TokenLoss(tokens.logprob * math.inf)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(make: SimpleNamespace) -> None:
    policy = make.policy()
    before = weights(policy)
    LOSSES.register("of_the_test_that_is_not_finite", not_finite)
    config = LearnerConfig(loss="of_the_test_that_is_not_finite")
    report = Learner(policy, config).update(make.group(1, [1.0, 0.0]))
    metrics = report.metrics
    assert (report.updates, metrics["skipped_updates"], metrics["nonfinite_updates"]) == (0, 1, 1)
    assert torch.equal(weights(policy), before)
