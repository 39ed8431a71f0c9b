"""An engine on a copy of the model: it samples from what was published, also when that changes amid a response."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coin import RECIPE

from stepgym.env.worker import run_blocking
from stepgym.errors import UserError
from stepgym.model.tiny import build_tiny_model
from stepgym.record.step import Sampling
from stepgym.train.copy_sync import CopySync
from stepgym.train.lora import LoRAConfig
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig
from stepgym.train.recipe import Recipe, check_recipe
from stepgym.train.sync import InProcessSync, find_sync, make_sync

PROMPT = np.array([5, 9, 2, 7], np.int32)


def recipe(**changes: Any) -> Recipe:
    return check_recipe({**RECIPE, "overlap": "async", **changes}, Path("x.yaml"))


@pytest.fixture
def synced(tmp_path: Path) -> Callable[..., tuple[CopySync, Policy]]:
    """A function that makes a policy, and the sync of an overlapped run to it."""

    def make(engine: dict[str, Any] | None = None, **config: Any) -> tuple[CopySync, Policy]:
        model, tokenizer = build_tiny_model(["look where it is"] * 3, width=32, layers=2, heads=2, context_length=4096)
        model.generation_config.eos_token_id = None
        tokenizer.eos_token = None
        plan = recipe(engine={"kind": "transformers", **(engine or {})})
        plain = find_sync(plan).before_policy(model)
        policy = Policy(model, PolicyConfig(device="cpu", **config))
        sync = make_sync(plan, policy, tokenizer, tmp_path, plain=plain)
        assert isinstance(sync, CopySync)
        return sync, policy

    return make


def move(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def gap(model: Any, completion: Any, start: int = 0, end: int | None = None) -> float:
    """Between the recorded log-probabilities and those of a model."""
    ids = torch.from_numpy(np.concatenate([PROMPT, completion.response_ids]).astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), -1)
    own = table[torch.arange(len(PROMPT) - 1, len(ids) - 1), ids[len(PROMPT) :]]
    return float((own - torch.from_numpy(completion.logprobs)).abs()[start:end].max())


def test_a_copy_where_the_model_cannot_be_shared() -> None:
    assert find_sync(recipe(overlap="none")) is InProcessSync
    assert find_sync(recipe(overlap="none"), 2) is CopySync
    assert find_sync(recipe(overlap="one_step_off")) is CopySync
    with pytest.raises(UserError, match=r"engine\.dtype: in training the engine runs the policy's own model"):
        find_sync(recipe(overlap="none")).check(recipe(engine={"kind": "transformers", "dtype": "float16"}))


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapter"])
def test_it_samples_from_what_was_published_and_nothing_else(
    synced: Callable[..., tuple[CopySync, Policy]], lora: bool
) -> None:
    torch.manual_seed(0)
    sync, policy = synced(lora=LoRAConfig(rank=3) if lora else None)
    sample = lambda: run_blocking(sync.engine.generate(PROMPT, Sampling(), max_tokens=20, seed=3))  # noqa: E731
    run_blocking(sync.start())
    run_blocking(sync.open())
    for version in ("0", "1", "2"):
        move(policy)
        if version != "0":
            assert gap(policy.model, sample()) > 1e-3  # still the old ones
        run_blocking(sync.publish(version))
        found = sample()
        assert list(found.weights_versions) == [(version, 0, 20)]
        assert gap(policy.model, found) < 1e-4
    move(policy)
    run_blocking(sync.publish("2"))  # equal versions are equal weights: nothing is copied
    assert gap(policy.model, sample()) > 1e-3
    run_blocking(sync.close())


def test_weights_that_are_published_amid_responses(synced: Callable[..., tuple[CopySync, Policy]]) -> None:
    torch.manual_seed(1)
    sync, policy = synced()
    models: dict[str, Any] = {}

    async def go() -> list[Any]:
        await sync.open()
        await sync.publish("0")
        models["0"] = copy.deepcopy(policy.model)
        asked = [
            asyncio.create_task(sync.engine.generate(PROMPT, Sampling(), max_tokens=300, seed=n)) for n in range(4)
        ]
        while not all(one.done() for one in asked):
            await asyncio.sleep(0.05)
            move(policy)  # the trainer at work, while the engine samples
            version = str(len(models))
            await sync.publish(version)
            models[version] = copy.deepcopy(policy.model)
        return [one.result() for one in asked]

    mixed = 0
    for found in run_blocking(go()):
        mixed += len(found.weights_versions) > 1
        assert found.weights_versions[0][1] == 0
        assert found.weights_versions[-1][2] == 300
        for version, start, end in found.weights_versions:
            assert gap(models[version], found, start, end) < 1e-3
    assert mixed
    run_blocking(sync.close())


def test_weights_that_were_gathered_are_taken_as_they_are(synced: Callable[..., tuple[CopySync, Policy]]) -> None:
    sync, policy = synced()
    move(policy)
    gathered = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    there = copy.deepcopy(policy.model)
    move(policy)
    run_blocking(sync.open())
    run_blocking(sync.publish("1", gathered))
    assert gap(there, run_blocking(sync.engine.generate(PROMPT, Sampling(), max_tokens=20, seed=3))) < 1e-4
    assert CopySync.gather(recipe(), policy) is None  # one process: read from the policy itself
    run_blocking(sync.close())


def test_the_copy_may_have_another_type(synced: Callable[..., tuple[CopySync, Policy]]) -> None:
    sync, policy = synced({"dtype": "bfloat16", "device": "cpu"})
    run_blocking(sync.open())
    run_blocking(sync.publish("0"))
    assert {parameter.dtype for parameter in sync._model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert gap(policy.model, run_blocking(sync.engine.generate(PROMPT, Sampling(), max_tokens=20, seed=3))) < 0.1
    run_blocking(sync.close())


def test_a_device_that_is_not_there(synced: Callable[..., tuple[CopySync, Policy]]) -> None:
    with pytest.raises(UserError, match=r"^engine\.device: 'gpu' cannot be used: [^\n]+$"):
        synced({"device": "gpu"})
