from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepgym.errors import UserError
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.lora import LoRAConfig
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig

CONFIG: dict[str, Any] = {
    "mini_batches": 2,
    "epochs": 2,
    "kl": {"kind": "k3", "coef": 0.1},
    "total_updates": 40,
    "optimizer": {"learning_rate": 1e-3, "warmup_updates": 3, "decay": "cosine", "weight_decay": 0.1},
}


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


@pytest.mark.parametrize(("architecture", "lora"), [("qwen3", False), ("llama", False), ("qwen3", True)])
def test_a_resumed_learner_makes_the_bit_identical_next_updates(
    make: SimpleNamespace, tmp_path: Path, architecture: str, lora: bool
) -> None:
    def policy(seed: int) -> Policy:
        if not lora:  # other weights, other reference
            return make.policy(architecture, seed=seed)
        adapter = LoRAConfig(rank=2, dropout=0.1)  # the same model below, another adapter
        return Policy(make.model(architecture), PolicyConfig(device="cpu", lora=adapter), seed=seed)

    made = [t for g in range(4) for t in make.group(g, [1.0, 0.0, 0.5], task=f"task {g}")]
    unbroken = Learner(policy(0), LearnerConfig(**CONFIG))
    torch.manual_seed(0)
    unbroken.update(made)
    store = CheckpointStore(tmp_path)
    saved = store.save(unbroken, score=0.5, extra={"iteration": 1})
    assert saved.adapter_path.exists() is lora
    assert (tmp_path / "reference").exists() is not lora
    for _ in range(2):
        unbroken.update(made)
    resumed = Learner(policy(7), LearnerConfig(**CONFIG))
    found = CheckpointStore(tmp_path).restore(resumed)
    assert found == saved
    assert (found.extra, found.score, found.update) == ({"iteration": 1}, 0.5, 4)
    assert (resumed.updates, resumed.batches) == (4, 1)
    for _ in range(2):
        report = resumed.update(made)
    assert torch.equal(weights(resumed.policy), weights(unbroken.policy))
    assert report.metrics["update"] == 12


def test_random_generators_are_put_back(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path)
    random.gauss()  # of the two it draws, one is kept for later
    store.save(learner)
    drawn = [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.gauss()]
    store.restore(learner)
    assert [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.gauss()] == drawn


def test_the_best_and_the_latest_are_kept(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path, keep=2)
    assert (store.latest(), store.best(), store.all()) == (None, None, [])
    assert store.restore(learner) is None
    for score in (0.1, 0.9, 0.3, None, 0.2):
        learner.optimizer.updates += 1
        store.save(learner, score=score)
    assert [checkpoint.update for checkpoint in store.all()] == [2, 4, 5]
    assert store.best().update == 2
    assert store.latest().update == 5


def test_a_checkpoint_of_the_same_update_takes_its_place(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path)
    for number in range(3):
        store.save(learner, score=float(number), extra={"number": number})
    (only,) = store.all()
    assert (only.extra, only.score) == ({"number": 2}, 2.0)
    assert [entry.name for entry in tmp_path.iterdir()] == [only.path.name]


def test_a_write_that_fails_leaves_nothing_and_the_last_one_stands(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path)
    store.save(learner)
    learner.optimizer.updates += 1

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        store.save(learner, tokenizer=Broken())
    assert [entry.name for entry in tmp_path.iterdir()] == ["update-00000000"]


def test_a_killed_writer_leaves_a_whole_checkpoint_or_none(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path)
    store.save(learner)
    learner.policy.model.save_pretrained(tmp_path / "start")
    script = f"""
        import os, signal, torch
        from pathlib import Path
        torch.set_num_threads(1)
        from stepgym.train.checkpoint import CheckpointStore
        from stepgym.train.config import LearnerConfig
        from stepgym.train.learner import Learner
        from stepgym.train.policy import Policy
        from stepgym.train.policy_config import PolicyConfig
        learner = Learner(Policy.load({str(tmp_path / "start")!r}, PolicyConfig(device="cpu")), LearnerConfig())
        learner.optimizer.updates = 5
        class Killer:
            def save_pretrained(self, folder):
                os.kill(os.getpid(), signal.SIGKILL)
        CheckpointStore({str(tmp_path)!r}).save(learner, tokenizer=Killer())
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -9
    assert any(entry.name.startswith(".partial") for entry in tmp_path.iterdir())
    assert store.latest().update == 0
    learner.optimizer.updates = 1
    store.save(learner)
    assert not any(entry.name.startswith(".partial") for entry in tmp_path.iterdir())
    assert store.latest().update == 1


def test_the_model_folder_is_one_that_transformers_loads(make: SimpleNamespace, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = Learner(make.policy(), LearnerConfig())
    checkpoint = CheckpointStore(tmp_path).save(learner)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.model_path)
    for one, two in zip(loaded.parameters(), learner.policy.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert (checkpoint.model_path / "model.safetensors").exists()


def test_under_lora_the_model_folder_is_merged_and_the_adapter_lies_beside_it(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = LearnerConfig(optimizer={"learning_rate": 0.05})
    learner = Learner(Policy(make.model(), PolicyConfig(device="cpu", lora=LoRAConfig(rank=2))), config)
    learner.update(make.group(1, [1.0, 0.0]))
    checkpoint = CheckpointStore(tmp_path).save(learner)
    merged = AutoModelForCausalLM.from_pretrained(checkpoint.model_path)
    apart = PeftModel.from_pretrained(make.model(), str(checkpoint.adapter_path))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        learned, base = learner.policy.model(ids).logits, make.model()(ids).logits
        assert torch.allclose(merged(ids).logits, learned, atol=1e-4)
        assert torch.equal(apart(ids).logits, learned)
        assert not torch.allclose(base, learned, atol=1e-2)
    # A checkpoint of a run that trained all weights has no adapter to go on with, only what belongs to the model.
    other = CheckpointStore(tmp_path / "other")
    other.save(Learner(make.policy(), LearnerConfig()))
    with pytest.raises(UserError, match=r"is in it, and nothing here has that name$"):
        other.restore(learner)


def test_bad_checkpoints_are_refused_in_one_line(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path)
    checkpoint = store.save(learner)
    (file,) = sorted((checkpoint.path / "state").iterdir())
    before = weights(learner.policy)
    other = Learner(Policy(make.model(hidden_size=32), learner.policy.config), LearnerConfig())
    with pytest.raises(UserError, match=r"policy/\S+ is \[89, 16\] in it and \[89, 32\] here$"):
        store.restore(other)
    deeper = Learner(Policy(make.model(num_hidden_layers=3), learner.policy.config), LearnerConfig())
    with pytest.raises(UserError, match=r"layers\.2\.\S+ is not in it$"):
        store.restore(deeper)
    shallower = Learner(Policy(make.model(num_hidden_layers=1), learner.policy.config), LearnerConfig())
    with pytest.raises(UserError, match=r"layers\.1\.\S+ is in it, and nothing here has that name$"):
        store.restore(shallower)
    with pytest.raises(UserError, match=r"is float32 in it and float64 here$"):
        store.restore(Learner(make.policy(dtype="float64"), LearnerConfig()))

    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2])
    with pytest.raises(UserError, match=rf"its file state/{file.name} has \d+ bytes, not {len(good)}$"):
        store.restore(learner)
    file.write_bytes(b"\xff" * len(good))
    with pytest.raises(UserError, match=r"state: it cannot be read: [^\n]+$"):
        store.restore(learner)
    file.unlink()
    with pytest.raises(UserError, match=rf"its file state/{file.name} is missing$"):
        store.restore(learner)
    assert torch.equal(weights(learner.policy), before)
    for text, said in [
        (json.dumps({"format": 1}), "its format is 1; this version reads 2"),
        ("{", r"state\.json cannot be read"),
        ("[]", r"state\.json cannot be read"),
        (json.dumps({"format": 2}), "it has no 'update'"),
    ]:
        (checkpoint.path / "state.json").write_text(text)
        with pytest.raises(UserError, match=said):
            store.latest()


def test_nothing_in_a_checkpoint_is_a_pickle_or_is_unpickled(
    make: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    learner = Learner(make.policy(), LearnerConfig(**CONFIG))
    learner.update(make.group(1, [1.0, 0.0]))
    store = CheckpointStore(tmp_path)
    checkpoint = store.save(learner)
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert file.suffix in (".safetensors", ".json")
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            with safe_open(file, framework="pt") as content:
                assert list(content.keys())

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert store.restore(learner) == checkpoint


class Counter:
    """A part with a tensor and plain values."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3)
        self.names: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "inner": {"names": self.names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.names = state["seen"].clone(), state["inner"]["names"]


def test_other_parts_are_kept_by_name(make: SimpleNamespace, tmp_path: Path) -> None:
    learner, store, part = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path), Counter()
    part.seen += 2.0
    part.names.append("one")
    store.save(learner, parts={"counter": part})
    again = Counter()
    store.restore(learner, parts={"counter": again})
    assert again.seen.tolist() == [2.0] * 3
    assert again.names == ["one"]
    with pytest.raises(UserError, match="counter/seen is in it, and nothing here has that name"):
        store.restore(learner)
    with pytest.raises(UserError, match="names that other parts cannot have"):
        store.save(learner, parts={"learner": part})
    part.names.append({1, 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="JSON"):
        store.save(learner, parts={"counter": part})
    assert [entry.name for entry in tmp_path.iterdir()] == ["update-00000000"]


def test_knobs_are_checked(make: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep must be 1 or more"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(UserError, match="the score must be finite"):
        CheckpointStore(tmp_path).save(Learner(make.policy(), LearnerConfig()), score=float("nan"))


def test_a_kill_while_an_old_one_is_deleted_leaves_a_store_to_go_on_with(
    make: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, store = Learner(make.policy(), LearnerConfig()), CheckpointStore(tmp_path, keep=1)
    store.save(learner)
    learner.optimizer.updates = 1

    def killed(path: Path) -> None:
        (Path(path) / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("stepgym.train.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(learner)
    assert [checkpoint.update for checkpoint in store.all()] == [1]
    learner.optimizer.updates = 2
    store.save(learner)
    assert [entry.name for entry in tmp_path.iterdir()] == ["update-00000002"]


def test_a_reference_that_is_missing_is_not_replaced_by_another(make: SimpleNamespace, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(Learner(make.policy(), LearnerConfig(**CONFIG)))
    shutil.rmtree(tmp_path / "reference")
    resumed = Learner(make.policy(seed=7), LearnerConfig(**CONFIG))
    before = weights(resumed.policy)
    with pytest.raises(UserError, match=r"reference: it is missing, and the KL term needs what is in it$"):
        store.restore(resumed)
    assert torch.equal(weights(resumed.policy), before)
