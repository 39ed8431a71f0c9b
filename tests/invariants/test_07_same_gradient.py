"""Promise 7: Merged, tree-packed and one-step-at-a-time training give the same gradient, under every reduction and
every credit. (Tree packs come later; here merged against one step at a time.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgym.credit import CREDITS
from stepgym.credit.treatment import treat
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.trajectory import Trajectory
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.policy import Policy

REDUCTIONS = ("token", "step", "trajectory", "group")


def batch(make: SimpleNamespace) -> list[Trajectory]:
    """Conversations that merge, that break, that share prompts; masked tokens; rewards on the way."""
    made = [
        *make.group(1, [1.0, 0.0, 0.5, -1.0], task="merges"),
        *make.group(2, [0.0, 1.0, 0.0], task="breaks", turns=(3, 5, 4), breaks=(1, 3)),
        *make.group(3, [1.0, 0.2], task="masked", turns=(4, 2), masked_tokens=True),
        *make.group(4, [1.0, 1.0], task="equal"),
    ]
    for sample, rewards in enumerate(((0.5, 0.0, 1.0), (0.0, 0.25, 0.0))):
        fields = {"reward": sum(rewards), "step_rewards": rewards, "turns": 3, "temperature": 0.7}
        made.append(make.trajectory(5, task="on the way", sample=sample, **fields))
    return made


def gradient_of(policy: Policy, made: list[Trajectory], make: SimpleNamespace, **config: Any) -> torch.Tensor:
    """Gradient of the first update, with the clip, the correction and a KL term in force."""
    settings: dict[str, Any] = {
        "credit": "grpo",
        "loss": {"kind": "ppo", "clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.5},
        "correction": {"kind": "truncated", "cap": 1.1},
        "kl": {"kind": "k3", "coef": 0.5},
    }
    reference = make.policy(seed=9, dtype=policy.config.dtype)
    learner = Learner(policy, LearnerConfig(**{**settings, **config}), reference)
    mini_batches, _ = learner.prepare(treat(made, OutcomePolicy())[0])
    learner._before_first_update(mini_batches)
    generator = torch.Generator().manual_seed(0)
    policy.model.zero_grad()
    for mini in mini_batches:
        # Old log-probabilities some way off, so that ratios differ from 1 and the clip bites.
        known = policy.logprobs(mini.micro_batches, len(mini.batch.tokens))
        mini.old_logprob = known + 0.3 * torch.randn(len(known), generator=generator, dtype=torch.float64).to(
            known.dtype
        )
        metrics = learner.backward(mini).means()
        assert metrics["clip_fraction_low"] > 0
        assert metrics["clip_fraction_high"] > 0
        assert metrics["importance_truncated"] > 0
    return make.gradient(policy)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("architecture", "dtype", "reduction"),
    [
        *(("qwen3", "float32", reduction) for reduction in REDUCTIONS),
        ("qwen3", "float64", "trajectory"),
        ("llama", "float32", "token"),
        ("llama", "float64", "group"),
    ],
)
def test_merged_and_single_steps_give_the_same_gradient_under_every_reduction(
    make: SimpleNamespace, architecture: str, dtype: str, reduction: str
) -> None:
    made, policy = batch(make), make.policy(architecture, dtype=dtype)
    alone = gradient_of(policy, made, make, rows="steps", reduction=reduction)
    merged = gradient_of(policy, made, make, rows="merged", reduction=reduction)
    assert alone.norm() > 1e-3
    # transformers normalises in float32 whatever the type of the weights, so float64 gains less than it could.
    assert distance(merged, alone) < (1e-5 if dtype == "float32" else 1e-6)


@pytest.mark.parametrize("credit", sorted(set(CREDITS) - {"grpo"}))
def test_merged_and_single_steps_give_the_same_gradient_under_every_credit(make: SimpleNamespace, credit: str) -> None:
    made, policy = batch(make), make.policy()
    alone = gradient_of(policy, made, make, rows="steps", credit=credit)
    merged = gradient_of(policy, made, make, rows="merged", credit=credit)
    assert alone.norm() > 1e-3
    assert distance(merged, alone) < 1e-5


def test_merging_really_makes_fewer_rows_and_reads_fewer_tokens(make: SimpleNamespace) -> None:
    made = batch(make)
    read = {}
    for rows in ("steps", "merged"):
        learner = Learner(make.policy(), LearnerConfig(rows=rows))
        read[rows] = learner.prepare(treat(made, OutcomePolicy())[0])[1]
    assert read["steps"]["tokens_trained"] == read["merged"]["tokens_trained"]
    assert read["merged"]["rows"] < 0.6 * read["steps"]["rows"]
    assert read["merged"]["tokens_rows"] < 0.7 * read["steps"]["tokens_rows"] == 0.7 * read["merged"]["tokens_steps"]


@pytest.mark.parametrize(("reduction", "budget"), [("token", 1), ("step", 150), ("trajectory", 60), ("group", 400)])
def test_micro_batches_do_not_change_the_gradient(make: SimpleNamespace, reduction: str, budget: int) -> None:
    made = batch(make)
    whole = gradient_of(make.policy(), made, make, reduction=reduction)
    assert distance(gradient_of(make.policy(budget=budget), made, make, reduction=reduction), whole) < 1e-5


@pytest.mark.parametrize("reduction", ["trajectory", "group"])
def test_mini_batches_of_merged_rows_give_the_same_updates(make: SimpleNamespace, reduction: str) -> None:
    made, weights = batch(make), {}
    for rows in ("steps", "merged"):
        policy = make.policy(dtype="float64")
        config = {"mini_batches": 3, "epochs": 2, "rows": rows, "reduction": reduction}
        config["optimizer"] = {"learning_rate": 1e-3, "eps": 1e-3}
        report = Learner(policy, LearnerConfig(**config)).update(made)
        assert report.updates == 6
        weights[rows] = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    assert float((weights["steps"] - weights["merged"]).abs().max()) < 1e-8
