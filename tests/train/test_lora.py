"""Adapters: they alone are trained, merged they are the same model, and every part of the trainer sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.model.engines.forward import SlotForward
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.tiny import build_tiny_model
from stepgym.record.step import Sampling
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.lora import LoRAConfig
from stepgym.train.packs.batch import make_batch
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig


def with_adapter(model: Any, seed: int = 0, **config: Any) -> Policy:
    """A policy whose adapter is not zero: as if it had been trained."""
    policy = Policy(model, PolicyConfig(device="cpu", lora=LoRAConfig(**config)), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(policy).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return policy


def trained(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in policy.model.named_parameters() if p.requires_grad}


def frozen(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora_" not in name}


def logprobs(policy: Policy, trajectory: Any) -> torch.Tensor:
    batch = make_batch([[trajectory]])
    return policy.logprobs(policy.micro_batches(batch), len(batch.tokens))


def test_a_new_adapter_changes_nothing_and_comes_from_the_seed(make: SimpleNamespace) -> None:
    plain = make.policy()
    state = torch.random.get_rng_state()
    one, again, other = (
        Policy(make.model(), PolicyConfig(device="cpu", lora=LoRAConfig(rank=3)), seed=seed) for seed in (1, 1, 2)
    )
    torch.manual_seed(0)
    make.model()
    assert torch.equal(logprobs(one, make.trajectory(turns=3)), logprobs(plain, make.trajectory(turns=3)))
    same = [torch.equal(a, b) for a, b in zip(trained(one).values(), trained(again).values(), strict=True)]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in zip(trained(one).values(), trained(other).values(), strict=True))
    torch.random.set_rng_state(state)
    Policy(plain.model, PolicyConfig(device="cpu", lora=LoRAConfig(rank=3)), seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(1, 9),
    alpha=st.floats(0.5, 40),
    rank_stabilized=st.booleans(),
    architecture=st.sampled_from(["qwen3", "llama", "gemma2"]),
    targets=st.sampled_from(["auto", ("q_proj", "down_proj"), ("mlp.up_proj",)]),
    seed=st.integers(0, 100),
)
def test_only_the_adapter_is_trained_and_merged_it_is_the_same_model(
    make: SimpleNamespace,
    tmp_path_factory: pytest.TempPathFactory,
    rank: int,
    alpha: float,
    rank_stabilized: bool,
    architecture: str,
    targets: Any,
    seed: int,
) -> None:
    options = {"rank": rank, "alpha": alpha, "rank_stabilized": rank_stabilized, "target_modules": targets}
    policy = with_adapter(make.model(architecture), seed, **options)
    policy_base, names = frozen(policy), set(trained(policy))
    assert names
    assert all("lora_" in name for name in names)
    folder = tmp_path_factory.mktemp("merged")
    policy.save(folder)
    merged = Policy.load(folder, PolicyConfig(device="cpu"))
    assert set(merged.model.state_dict()) == set(make.model(architecture).state_dict())
    trajectory = make.trajectory(seed, turns=3)
    before = logprobs(policy, trajectory)
    assert torch.allclose(before, logprobs(merged, trajectory), atol=1e-4)
    assert not torch.allclose(before, logprobs(make.policy(architecture), trajectory), atol=1e-2)

    learner = Learner(policy, LearnerConfig(optimizer={"learning_rate": 1e-2, "weight_decay": 0.1}))
    adapter = {name: p.detach().clone() for name, p in trained(policy).items()}
    learner.update(make.group(seed, [1.0, 0.0, 0.5]))
    assert all(torch.equal(tensor, policy_base[name]) for name, tensor in frozen(policy).items())
    assert not any(torch.equal(p, adapter[name]) for name, p in trained(policy).items())
    assert {id(p) for g in learner.optimizer._adamw.param_groups for p in g["params"]} == {
        id(p) for p in trained(policy).values()
    }


def test_the_gradient_is_that_of_the_merged_weights(make: SimpleNamespace) -> None:
    """d/dB of W + s B A is s (d/dW) A^T, and d/dA is s B^T (d/dW)."""
    policy = with_adapter(make.model(), rank=2, alpha=6.0)
    full = make.policy()
    full.model.load_state_dict({name: tensor.clone() for name, tensor in policy.adapter.merged()})
    batch = make_batch([[make.trajectory(turns=3)]])
    for each in (policy, full):
        (micro_batch,) = each.micro_batches(batch)
        each.score(micro_batch).logprob.sum().backward()
    assert all(p.grad is None for name, p in policy.model.named_parameters() if "lora_" not in name)
    for name, parameter in full.model.named_parameters():
        owner = policy.model.get_submodule(name.removesuffix(".weight"))
        if not hasattr(owner, "lora_A"):
            continue
        a, b = owner.lora_A["default"].weight, owner.lora_B["default"].weight
        assert torch.allclose(b.grad, 3.0 * parameter.grad @ a.T, atol=1e-3, rtol=1e-3)
        assert torch.allclose(a.grad, 3.0 * b.T @ parameter.grad, atol=1e-3, rtol=1e-3)


def test_the_reference_is_the_base_without_a_copy(make: SimpleNamespace) -> None:
    policy, base = with_adapter(make.model()), make.policy()
    reference = policy.frozen_copy()
    assert reference.model is policy.model
    trajectory = make.trajectory(turns=3)
    moved = logprobs(policy, trajectory)
    assert torch.equal(logprobs(reference, trajectory), logprobs(base, trajectory))
    assert torch.equal(logprobs(policy, trajectory), moved)
    assert trained(policy)
    config = LearnerConfig(kl={"kind": "k3", "coef": 0.1}, optimizer={"learning_rate": 1e-3})
    report = Learner(policy, config).update(make.group(1, [1.0, 0.0]))
    other = Learner(with_adapter(make.model()), config, reference=base).update(make.group(1, [1.0, 0.0]))
    assert report.metrics["kl"] > 0
    assert report.metrics["kl"] == other.metrics["kl"]


@pytest.mark.parametrize("wrapped", ["the model", "PEFT's own"])
def test_the_engine_in_process_samples_from_base_and_adapter(make: SimpleNamespace, wrapped: str) -> None:
    model, tokenizer = build_tiny_model(["look where it is"] * 3, width=32, layers=2, heads=2, context_length=64)
    policy = with_adapter(model, rank=4)
    given_model = policy.model if wrapped == "the model" else policy.adapter._peft
    engine = TransformersEngine.wrap(given_model, tokenizer)

    async def sample() -> Any:
        prompts = [np.array([5, 9, 2], np.int32), np.array([5, 9, 2, 7], np.int32)]
        return prompts, await asyncio.gather(
            *(engine.generate(p, Sampling(), max_tokens=12, seed=i) for i, p in enumerate(prompts))
        )

    def gap(found: Any) -> float:
        worst = 0.0
        for prompt, completion in zip(*found, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, completion.response_ids]).astype(np.int64))
            with torch.no_grad():
                table = torch.log_softmax(policy.model(input_ids=ids[None], use_cache=False).logits[0], -1)
            own = table[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]]
            worst = max(worst, float((own - torch.from_numpy(completion.logprobs)).abs().max()))
        return worst

    async def check() -> None:
        await engine.open()
        assert isinstance(engine._driver.batcher._forward, SlotForward)
        first = await sample()
        assert gap(first) < 1e-5
        with policy.frozen_copy()._computing():  # whoever scores the base takes the adapter from nobody
            assert gap(await sample()) > 1e-2
        assert gap(first) < 1e-5
        with torch.no_grad():
            for parameter in trained(policy).values():
                parameter.mul_(1.5)
        engine.weights_version = "2"
        assert gap(first) > 1e-2
        assert gap(await sample()) < 1e-5
        await engine.close()

    asyncio.run(check())


def test_a_saved_adapter_is_one_that_peft_loads(make: SimpleNamespace, tmp_path: Path) -> None:
    from peft import PeftModel

    policy, trajectory = with_adapter(make.model(), rank=3), make.trajectory(turns=3)
    policy.adapter.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(make.model(), str(tmp_path)).eval()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, policy.model(ids).logits)
    other = with_adapter(make.model(), seed=4, rank=3)
    assert not torch.equal(logprobs(other, trajectory), logprobs(policy, trajectory))
    other.adapter.load(tmp_path)
    assert torch.equal(logprobs(other, trajectory), logprobs(policy, trajectory))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_adapters_that_do_not_fit_are_one_line(make: SimpleNamespace, tmp_path: Path) -> None:
    with_adapter(make.model(), rank=3).adapter.save(tmp_path)
    for options, message in (
        ({"rank": 4}, r"is \[3, \d+\], and \[4, \d+\] in the model's adapter$"),
        ({"rank": 3, "target_modules": ("q_proj",)}, r"other layers than the model's adapter: [^\n]+$"),
    ):
        with pytest.raises(UserError, match=message):
            with_adapter(make.model(), **options).adapter.load(tmp_path)
    fitting = with_adapter(make.model(), rank=3).adapter
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"it cannot be read: [^\n]+$"):
        fitting.load(tmp_path)
    with pytest.raises(UserError, match=r"policy\.lora: no adapter fits the model: [^\n]+$"):
        with_adapter(make.model(), target_modules=("nothing",))
    with pytest.raises(UserError, match=r"target_modules: 'lm_head' has the weights of both"):
        with_adapter(make.model("qwen3"), target_modules=("lm_head", "q_proj"))


def test_an_adapter_on_a_head_of_its_own_is_scored_and_merged(make: SimpleNamespace, tmp_path: Path) -> None:
    policy, trajectory = with_adapter(make.model("llama"), target_modules=("lm_head", "q_proj")), make.trajectory()
    assert policy.forward_module._head_form is None
    policy.save(tmp_path)
    merged = Policy.load(tmp_path, PolicyConfig(device="cpu"))
    assert torch.allclose(logprobs(policy, trajectory), logprobs(merged, trajectory), atol=1e-4)


def test_dropout_is_on_where_gradients_are_taken_and_nowhere_else(make: SimpleNamespace) -> None:
    policy = with_adapter(make.model(), dropout=0.5)
    quiet = with_adapter(make.model())
    trajectory = make.trajectory(turns=3)
    batch = make_batch([[trajectory]])
    (micro_batch,) = policy.micro_batches(batch)
    assert torch.equal(logprobs(policy, trajectory), logprobs(quiet, trajectory))
    with policy.training():
        one, two = policy.score(micro_batch).logprob, policy.score(micro_batch).logprob
        assert not torch.equal(one, two)
        assert torch.equal(logprobs(policy, trajectory), logprobs(quiet, trajectory))
        assert policy.model.training
    # What the ratio is taken to is without dropout, also in the first and only update of a batch.
    group = make.group(1, [1.0, 0.0])
    ratios = [Learner(each, LearnerConfig()).update(group).metrics["ratio"] for each in (quiet, policy)]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)
    assert abs(ratios[1] - 1.0) > 1e-4


def test_gradient_checkpointing_and_bfloat16_weights(make: SimpleNamespace) -> None:
    batch = make_batch([[make.trajectory(turns=3)]])
    gradients = []
    for checkpointing in (False, True):
        policy = with_adapter(make.model())
        config = policy.config.model_copy(update={"gradient_checkpointing": checkpointing})
        fresh = Policy(make.model(), config)
        fresh.model.load_state_dict(policy.model.state_dict())
        (micro_batch,) = fresh.micro_batches(batch)
        with fresh.training():
            fresh.score(micro_batch).logprob.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trained(fresh).values()]))
    assert torch.allclose(*gradients, atol=1e-5)
    assert gradients[0].abs().max() > 0
    half = Policy(make.model(), PolicyConfig(device="cpu", dtype="bfloat16", lora=LoRAConfig()))
    assert {p.dtype for p in trained(half).values()} == {torch.float32}  # an optimizer's small steps are not lost
    assert half.model.dtype == torch.bfloat16
    report = Learner(half, LearnerConfig()).update(make.group(1, [1.0, 0.0]))
    assert np.isfinite(report.metrics["grad_norm"])
