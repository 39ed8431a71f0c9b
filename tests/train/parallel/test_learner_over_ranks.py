"""A learner over several processes does what it does on one, and its checkpoints go from any number to any other."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.record.outcome import OutcomePolicy
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.lora import LoRAConfig
from stepgym.train.parallel.nested_state import take_apart
from stepgym.train.parallel.processes import Processes
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig
from stepgym.train.weights import whole

Ranks = Callable[..., list[Any]]
CONFIG: dict[str, Any] = {
    "mini_batches": 2,
    "epochs": 2,
    "entropy": True,
    "kl": {"kind": "k3", "coef": 0.1},
    "total_updates": 40,
    "optimizer": {"learning_rate": 1e-3, "warmup_updates": 3, "decay": "cosine", "weight_decay": 0.1},
}


def records() -> Any:
    """tests/train/conftest.py, in a process that pytest does not run."""
    spec = importlib.util.spec_from_file_location("train_records", Path(__file__).parent.parent / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learner_of(processes: Processes, seed: int = 0, lora: bool = False, **config: Any) -> Learner:
    adapter = LoRAConfig(rank=2) if lora else None
    options = PolicyConfig(device="cpu", micro_batch_tokens=60, lora=adapter)
    model = records().make_model("qwen3", 0 if lora else seed)
    return Learner(Policy(model, options, seed=seed, processes=processes), LearnerConfig(**{**CONFIG, **config}))


def batch() -> list[Any]:
    make_group = records().make_group
    return [t for g in range(4) for t in make_group(g, [1.0, 0.0, 0.5], task=f"task {g}")]


def digest(learner: Learner) -> str:
    """Of all weights, averages of the optimizer and weights of the reference, exactly."""
    state, _ = take_apart({"policy": dict(learner.policy.model.named_parameters()), "learner": learner.state_dict()})
    tensors = [state[name] for name in sorted(state)]
    if learner.reference is not None and learner.reference.frozen is not None:
        with learner.reference.frozen.in_place():
            tensors += [whole(p.detach()).clone() for p in learner.policy.model.parameters()]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(whole(tensor.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()


def trained(learner: Learner) -> list[float]:
    parts = [whole(p.detach()).flatten() for p in learner.policy.model.parameters() if p.requires_grad]
    return torch.cat(parts).tolist()


def gradient(processes: Processes, architecture: str, dtype: str, layout: str, budget: int) -> list[float]:
    """Of the first update, with pi_old some way off. Two samples said the same and were rewarded differently."""
    made = batch()
    twin = dataclasses.replace(made[1], id=dataclasses.replace(made[1].id, sample=9), reward=1.0)
    options = PolicyConfig(device="cpu", dtype=dtype, layout=layout, micro_batch_tokens=budget)
    policy = Policy(records().make_model(architecture), options, processes=processes)
    learner = Learner(policy, LearnerConfig(loss={"kind": "ppo", "dual_clip": 1.5}, correction="truncated", epochs=2))
    mini_batches, _ = learner.prepare(treat([*made, twin], OutcomePolicy())[0])
    for mini in mini_batches:
        assert mini.old_logprob is not None
        mini.old_logprob += torch.linspace(-0.3, 0.3, len(mini.old_logprob))
        learner.backward(mini)
    parts = [whole(p.grad) if p.grad is not None else torch.zeros(p.shape) for p in policy.model.parameters()]
    return torch.cat([part.flatten() for part in parts]).tolist()


@pytest.mark.parametrize(
    ("architecture", "dtype", "size"),
    [
        ("qwen2", "float32", 2),
        ("qwen3", "float32", 3),
        ("qwen3", "float64", 2),
        ("llama", "float32", 2),
        ("qwen3_moe", "float32", 2),
        pytest.param("qwen3_moe", "float64", 3, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_trees_over_ranks_is_that_of_every_step_alone(
    ranks: Ranks, architecture: str, dtype: str, size: int
) -> None:
    alone = torch.tensor(gradient(Processes.start("cpu", {}), architecture, dtype, "steps", 1), dtype=torch.float64)
    assert alone.norm() > 0
    for budget in (50, 16384):
        for answer in ranks(gradient, size=size, architecture=architecture, dtype=dtype, layout="tree", budget=budget):
            error = float((torch.tensor(answer, dtype=torch.float64) - alone).norm() / alone.norm())
            assert error < {"float32": 1e-5, "float64": 1e-6}[dtype]


def learn(processes: Processes, lora: bool, config: dict[str, Any]) -> dict[str, Any]:
    learner = learner_of(processes, lora=lora, **config)
    metrics = [dict(learner.update(batch()).metrics) for _ in range(2)]
    return {"weights": trained(learner), "metrics": metrics}


@pytest.mark.parametrize(
    ("size", "lora", "config"),
    [
        (2, False, {}),
        (3, False, {"loss": {"kind": "gspo", "unit": "trajectory"}, "correction": "truncated"}),
        (2, True, {}),
    ],
)
def test_updates_over_ranks_are_those_of_one_process(
    ranks: Ranks, size: int, lora: bool, config: dict[str, Any]
) -> None:
    alone = learn(Processes.start("cpu", {}), lora, config)
    before = trained(learner_of(Processes.start("cpu", {}), lora=lora))
    moved = torch.tensor(alone["weights"]) - torch.tensor(before)
    for answer in ranks(learn, size=size, lora=lora, config=config):
        error = torch.tensor(answer["weights"]) - torch.tensor(alone["weights"])
        assert error.norm() / moved.norm() < 1e-3  # of what four Adam steps moved; it divides by small numbers
        assert error.norm() / torch.tensor(before).norm() < 1e-5
        for ours, theirs in zip(alone["metrics"], answer["metrics"], strict=True):
            assert set(ours) == set(theirs)
            for name in set(ours) - {"seconds", "tokens_forward", "micro_batches"}:  # micro-batches are cut smaller
                assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
            assert theirs["tokens_forward"] >= ours["tokens_forward"]
            assert theirs["micro_batches"] >= ours["micro_batches"]


def write(processes: Processes, folder: str, lora: bool) -> dict[str, Any]:
    learner = learner_of(processes, lora=lora)
    learner.update(batch())
    saved = CheckpointStore(folder).save(learner, score=0.25, extra={"iteration": 1})
    return {"digest": digest(learner), "path": str(saved.path), "drawn": torch.rand(2).tolist()}


def read(processes: Processes, folder: str, lora: bool, save: bool) -> dict[str, Any]:
    torch.manual_seed(100 + processes.rank)
    learner = learner_of(processes, seed=7, lora=lora)  # other weights, another reference
    other = digest(learner)
    found = CheckpointStore(folder).restore(learner)
    assert found is not None
    answer = {"other": other, "digest": digest(learner), "path": str(found.path), "drawn": torch.rand(2).tolist()}
    learner.update(batch())
    if save:
        CheckpointStore(folder).save(learner)
    return answer | {"after": digest(learner), "updates": learner.updates, "weights": trained(learner)}


@pytest.mark.parametrize(
    ("sizes", "lora"),
    [
        ((1, 2, 1), False),
        pytest.param((2, 3, 2), False, marks=pytest.mark.slow),
        pytest.param((3, 1, 2), True, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(
    ranks: Ranks, tmp_path: Path, sizes: tuple[int, ...], lora: bool
) -> None:
    first, second, third = sizes
    written = ranks(write, size=first, folder=tmp_path, lora=lora)
    found = ranks(read, size=second, folder=tmp_path, lora=lora, save=True)
    last = ranks(read, size=third, folder=tmp_path, lora=lora, save=False)
    for answer in found:
        assert answer["other"] != answer["digest"] == written[0]["digest"]
        assert answer["path"] == written[0]["path"]
        assert answer["updates"] == 8
    for answer in last:
        assert answer["digest"] == found[0]["after"]
        assert answer["updates"] == 12
    for rank in range(min(first, second)):
        assert found[rank]["drawn"] == written[rank]["drawn"]
    # The updates after are those of a run that was never broken, up to the order in which shards are summed.
    learner = learner_of(Processes.start("cpu", {}), lora=lora)
    for _ in range(3):
        learner.update(batch())
    error = torch.tensor(last[0]["weights"]) - torch.tensor(trained(learner))
    assert error.norm() / torch.tensor(trained(learner)).norm() < 1e-5


def export(processes: Processes, folder: str, lora: bool) -> str:
    learner = learner_of(processes, lora=lora)
    learner.update(batch())
    return str(CheckpointStore(folder).save(learner).path)


@pytest.mark.parametrize("lora", [False, True])
def test_the_model_folder_of_a_sharded_run_is_that_of_one_process(ranks: Ranks, tmp_path: Path, lora: bool) -> None:
    from safetensors.torch import load_file

    alone = Path(export(Processes.start("cpu", {}), str(tmp_path / "one"), lora))
    (sharded, _) = map(Path, ranks(export, folder=tmp_path / "two", lora=lora))
    for name in ["model/model.safetensors"] + ["adapter/adapter_model.safetensors"] * lora:
        ours, theirs = load_file(alone / name), load_file(sharded / name)
        assert set(ours) == set(theirs)
        for key, tensor in ours.items():
            torch.testing.assert_close(theirs[key], tensor, rtol=1e-4, atol=1e-5)


class Broken:
    def save_pretrained(self, folder: Path) -> None:
        raise OSError("no space left on device")


def misuse(processes: Processes, folder: str) -> list[Any]:
    """What goes wrong on one rank goes wrong on all, and the run could go on."""
    learner = learner_of(processes)
    store = CheckpointStore(folder)
    said = []
    try:
        store.save(learner, tokenizer=Broken())
    except OSError as error:
        said.append(str(error))
    said.append(store.latest())
    saved = store.save(learner)
    processes.barrier()
    if processes.is_lead:
        for file in (saved.path / "state").glob("shard-00002*"):
            file.unlink()
    processes.barrier()
    try:
        store.restore(learner)
    except UserError as error:
        said.append(str(error).rpartition("/")[2])
    return [*said, processes.gather(processes.rank)]


def test_what_fails_on_one_rank_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    expected = ["no space left on device", None, "shard-00002-model-00001-of-00001.safetensors is missing", [0, 1]]
    assert ranks(misuse, folder=tmp_path) == [expected, expected]
