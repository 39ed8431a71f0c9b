"""A critic whose weights are sharded: values, gradient and updates are those of one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgym.train.config import LearnerConfig
from stepgym.train.critic import Critic
from stepgym.train.learner import Learner
from stepgym.train.lora import LoRAConfig
from stepgym.train.parallel.processes import Processes
from stepgym.train.policy import Policy, PolicyConfig
from stepgym.train.weights import whole

_spec = importlib.util.spec_from_file_location("train_fixtures", Path(__file__).parents[1] / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
records = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(records)

Ranks = Callable[..., list[Any]]


def learner_of(processes: Processes | None, architecture: str, lora: bool) -> Learner:
    """A learner with credit gae, whose critic begins with a head that is not zero."""
    held = PolicyConfig(device="cpu", micro_batch_tokens=60, lora=LoRAConfig(rank=2) if lora else None)
    policy = Policy(records.make_model(architecture), held, processes=processes)
    quick = {"learning_rate": 1e-3}
    config = LearnerConfig(
        credit={"kind": "gae", "gae_lambda": 0.9}, critic={"optimizer": quick}, optimizer=quick, mini_batches=2
    )
    learner = Learner(policy, config)
    head = learner.critic.module.value_head  # type: ignore[union-attr]
    with torch.no_grad():
        weight = torch.linspace(-1, 1, head.weight.numel()).reshape(head.weight.shape)
        for parameter, value in ((head.weight, weight), (head.bias, torch.full((1,), 0.25))):
            if hasattr(parameter, "to_local"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    return learner


def batch() -> list[Any]:
    return [t for task in "abc" for t in records.make_group(ord(task), [1.0, 0.0, -0.5], task=task, turns=(1, 4, 2))]


def weights(critic: Critic) -> torch.Tensor:
    return torch.cat([whole(p).detach().double().flatten() for p in critic.module.parameters()])


def train(processes: Processes | None, architecture: str, lora: bool) -> tuple[Learner, dict[str, float]]:
    torch.set_num_threads(1)
    learner = learner_of(processes, architecture, lora)
    learner.update(batch())
    return learner, dict(learner.update(batch()).metrics)


def compare(processes: Processes, architecture: str, lora: bool) -> dict[str, Any]:
    alone, alone_metrics = train(None, architecture, lora)
    together, metrics = train(processes, architecture, lora)
    start = weights(learner_of(None, architecture, lora).critic)  # type: ignore[arg-type]
    ours, theirs = weights(together.critic), weights(alone.critic)  # type: ignore[arg-type]
    names = ("value_loss", "value_mean", "return_mean", "explained_variance", "critic_grad_norm", "value_clip_fraction")
    return {
        "error": float((ours - theirs).norm() / (theirs - start).norm()),
        "metrics": [[metrics[name], alone_metrics[name]] for name in names],
        "updates": together.critic.optimizer.updates,  # type: ignore[union-attr]
    }


@pytest.mark.parametrize(
    ("architecture", "lora", "size"), [("qwen3", False, 2), ("llama", True, 2), ("llama", False, 3)]
)
def test_updates_over_ranks_are_those_of_one(ranks: Ranks, architecture: str, lora: bool, size: int) -> None:
    for answer in ranks(compare, size=size, architecture=architecture, lora=lora):
        assert answer["error"] < 1e-3  # of what two batches of AdamW moved
        for found, expected in answer["metrics"]:
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert answer["updates"] == 4
