"""Promise 7: Merged, tree-packed and one-step-at-a-time training give the same gradient, under every reduction and
every credit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgym.credit import CREDITS
from stepgym.credit.treatment import treat
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.config import LearnerConfig
from stepgym.train.corrections import CORRECTIONS
from stepgym.train.learner import Learner
from stepgym.train.losses import LOSSES
from stepgym.train.packs.batch import make_batch
from stepgym.train.policy import Policy
from stepgym.train.update_report import batch_metrics

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
        "loss": {"kind": "ppo", "clip_low": 0.03, "clip_high": 0.05, "dual_clip": 1.5},
        "correction": {"kind": "truncated", "cap": 1.1},
        "kl": {"kind": "k3", "coef": 0.5},
        "epochs": 2,
    }
    reference = make.policy(seed=9, dtype=policy.config.dtype)
    learner = Learner(policy, LearnerConfig(**{**settings, **config}), reference)
    mini_batches, _ = learner.prepare(treat(made, OutcomePolicy())[0])
    # Weights some way off those of pi_old, so that ratios differ from 1 and the clip bites.
    move(policy)
    learner._moved = True
    policy.model.zero_grad()
    for mini in mini_batches:
        metrics = learner.backward(mini).means()
        assert metrics["ratio_max"] > 1.05
        if "loss" not in config:
            assert metrics["clip_fraction_low"] > 0
            assert metrics["clip_fraction_high"] > 0
        if "correction" not in config:
            assert metrics["importance_truncated"] > 0
    return make.gradient(policy)


def move(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.add_(0.1 * noise * parameter.std().nan_to_num())


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


# transformers normalises in float32 whatever the type of the weights, so float64 gains less than it could.
LIMIT = {"float32": 1e-5, "float64": 1e-6}


@pytest.mark.parametrize(
    ("architecture", "dtype", "reduction"),
    [
        *(("qwen3", "float32", reduction) for reduction in REDUCTIONS),
        ("qwen3", "float64", "trajectory"),
        ("qwen2", "float32", "trajectory"),
        ("qwen2", "float64", "step"),
        ("llama", "float32", "token"),
        ("llama", "float64", "group"),
        ("qwen3_moe", "float32", "trajectory"),
        ("qwen3_moe", "float64", "token"),
        ("mistral", "float32", "trajectory"),
    ],
)
def test_every_layout_gives_the_same_gradient(
    make: SimpleNamespace, architecture: str, dtype: str, reduction: str
) -> None:
    made = batch(make)

    def found(layout: str, budget: int = 16384) -> torch.Tensor:
        policy = make.policy(architecture, dtype=dtype, layout=layout, budget=budget)
        assert policy.forward_module.branches
        return gradient_of(policy, made, make, reduction=reduction)

    alone = found("steps", budget=1)
    assert alone.norm() > 1e-3
    for layout, budget in (("steps", 400), ("merged", 16384), ("tree", 16384), ("tree", 1), ("tree", 40), ("tree", 97)):
        assert distance(found(layout, budget), alone) < LIMIT[dtype], (layout, budget)


@pytest.mark.parametrize("credit", sorted(set(CREDITS) - {"grpo", "gae"}))
def test_every_layout_gives_the_same_gradient_under_every_credit(make: SimpleNamespace, credit: str) -> None:
    made = batch(make)
    alone = gradient_of(make.policy(layout="steps"), made, make, credit=credit)
    assert alone.norm() > 1e-3
    for layout, budget in (("merged", 16384), ("tree", 120)):
        assert distance(gradient_of(make.policy(layout=layout, budget=budget), made, make, credit=credit), alone) < 1e-5


def test_every_layout_gives_the_same_gradient_to_policy_and_critic_under_credit_by_token(make: SimpleNamespace) -> None:
    made = [trajectory for trajectory in batch(make) if trajectory.id.task_id != "breaks"]

    def found(layout: str, budget: int = 16384) -> torch.Tensor:
        policy = make.policy(layout=layout, budget=budget)
        config = LearnerConfig(
            credit={"kind": "gae", "gamma": 0.99, "gae_lambda": 0.9},
            critic={},
            kl={"kind": "k1", "coef": 0.2, "applies_to": "reward"},
            epochs=2,
        )
        learner = Learner(policy, config, make.policy(seed=9))
        assert learner.critic is not None
        with torch.no_grad():
            torch.nn.init.normal_(learner.critic.module.value_head.weight, generator=torch.Generator().manual_seed(1))
        (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
        move(policy)
        learner._moved = True
        learner.backward(mini)
        assert learner.critic.backward(mini)["value_loss"] > 0.1
        own = [p.grad.double().flatten() for p in learner.critic.module.parameters() if p.grad is not None]
        return torch.cat([make.gradient(policy) / make.gradient(policy).norm(), torch.cat(own) / torch.cat(own).norm()])

    alone = found("steps", budget=1)
    for layout, budget in (("merged", 16384), ("tree", 16384), ("tree", 40)):
        assert distance(found(layout, budget), alone) < 1e-5, (layout, budget)


@pytest.mark.parametrize(
    "config",
    [
        *({"loss": name} for name in sorted(set(LOSSES) - {"ppo", "cross_entropy", "reinforce"})),
        {"loss": {"kind": "gspo", "unit": "trajectory"}},
        *({"correction": name} for name in sorted(set(CORRECTIONS) - {"truncated"})),
        {"correction": {"kind": "sequence_truncated", "unit": "trajectory"}},
        {"correction": {"kind": "geometric_mask", "unit": "trajectory", "low": 0.99, "high": 1.01}},
        {"kl": {"kind": "k1", "coef": 0.2, "applies_to": "reward"}},
    ],
    ids=str,
)
def test_every_layout_gives_the_same_gradient_under_every_loss_and_correction(
    make: SimpleNamespace, config: dict[str, Any]
) -> None:
    made = batch(make)
    alone = gradient_of(make.policy(layout="steps", budget=1), made, make, **config)
    assert alone.norm() > 1e-4
    for layout, budget in (("merged", 60), ("tree", 16384), ("tree", 60)):
        assert distance(gradient_of(make.policy(layout=layout, budget=budget), made, make, **config), alone) < 1e-5


def test_tokens_that_several_samples_share_keep_their_own_advantages(make: SimpleNamespace) -> None:
    """Three samples begin alike, one after the other says the same throughout; their advantages differ."""
    prompt = [5, 6, 7]
    said = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [8, 2, 3]]
    made = [
        Trajectory(
            id=TrajectoryId("train", 0, "shared", sample),
            outcome=Outcome.COMPLETED,
            steps=[
                Step(prompt_ids=prompt, response_ids=ids, logprobs=[-2.0] * 3, sampling=Sampling()),
                Step(prompt_ids=[*prompt, *ids, 9], response_ids=[3, 4], logprobs=[-2.0] * 2, sampling=Sampling()),
            ],
            reward=reward,
        )
        for sample, (ids, reward) in enumerate(zip(said, (1.0, 0.0, 0.25, -1.0), strict=True))
    ]
    policies = {layout: make.policy(layout=layout) for layout in ("steps", "tree")}
    found = {
        layout: gradient_of(policy, made, make, loss="cispo", correction="none") for layout, policy in policies.items()
    }
    (micro,) = policies["tree"].micro_batches(make_batch([made]))
    assert micro.which is not None
    assert len(micro.target) < len(micro.token)
    assert found["steps"].norm() > 1e-3
    assert distance(found["tree"], found["steps"]) < 1e-5


def test_a_tree_really_reads_fewer_tokens(make: SimpleNamespace) -> None:
    made = batch(make)
    read = {}
    for layout in ("steps", "merged", "tree"):
        learner = Learner(make.policy(layout=layout), LearnerConfig())
        mini_batches, signals = learner.prepare(treat(made, OutcomePolicy())[0])
        read[layout] = batch_metrics(signals, mini_batches, learner.policy.processes)
    assert len({numbers["tokens_trained"] for numbers in read.values()}) == 1
    assert read["merged"]["sequences"] < 0.6 * read["merged"]["steps"]
    assert read["merged"]["tokens_forward"] < 0.7 * read["steps"]["tokens_forward"]
    assert read["tree"]["tokens_forward"] == read["tree"]["tokens_unique"] < 0.8 * read["merged"]["tokens_forward"]


@pytest.mark.parametrize("architecture", ["gemma2", "granite"])
def test_models_that_do_more_than_plain_attention_or_a_plain_head_give_the_same_gradient_too(
    make: SimpleNamespace, architecture: str
) -> None:
    made = batch(make)
    alone = gradient_of(make.policy(architecture, layout="steps", budget=1), made, make)
    assert distance(gradient_of(make.policy(architecture, layout="auto"), made, make), alone) < 1e-5


@pytest.mark.parametrize("reduction", ["trajectory", "group"])
def test_mini_batches_of_every_layout_make_the_same_updates(make: SimpleNamespace, reduction: str) -> None:
    made, weights = batch(make), {}
    for layout in ("steps", "merged", "tree"):
        policy = make.policy(dtype="float64", layout=layout)
        config = {"mini_batches": 3, "epochs": 2, "reduction": reduction}
        config["optimizer"] = {"learning_rate": 1e-3, "eps": 1e-3}
        report = Learner(policy, LearnerConfig(**config)).update(made)
        assert report.updates == 6
        weights[layout] = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    for layout in ("merged", "tree"):
        assert float((weights["steps"] - weights[layout]).abs().max()) < 1e-8
