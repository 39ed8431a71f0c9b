from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stepgym.train.lora import Adapter, LoRAConfig
from stepgym.train.parallel.processes import Processes
from stepgym.train.parallel.sharding import FrozenWeights, reduce_gradients, shard

Ranks = Callable[..., list[Any]]


class Root(torch.nn.Module):
    """A model whose head's weight is used beside its own forward, as in training."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = torch.nn.functional.linear(hidden, self.model.get_output_embeddings().weight)[:, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def model_of(architecture: str, lora: bool = False) -> tuple[Any, Adapter | None]:
    import transformers

    sizes = {
        "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
        "tie_word_embeddings": architecture == "Qwen3",
    }  # fmt: skip
    if architecture == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(getattr(transformers, f"{architecture}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.eval()
    adapter = Adapter(model, LoRAConfig(rank=2), seed=1) if lora else None
    if lora:
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, adapter


BATCHES = [torch.arange(2 * n).reshape(2, n) * k % 61 for n, k in ((9, 7), (5, 3), (12, 11), (7, 5), (4, 17))]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


def loss_of(root: Root, ids: torch.Tensor) -> torch.Tensor:
    logprob = root(ids)
    return (logprob * torch.linspace(-1, 1, logprob.numel()).reshape(logprob.shape)).sum() / 100


def compare(processes: Processes, architecture: str, lora: bool, checkpointing: bool, at_once: bool) -> dict[str, Any]:
    """Gradients of five micro-batches, dealt to ranks and sharded, against all of them on one unsharded model."""
    alone = Root(model_of(architecture, lora)[0])
    for ids in BATCHES:
        loss_of(alone, ids).backward()
    expected = gradients(alone.model)
    model, _ = model_of(architecture, lora)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    root = Root(model)
    shard(root, list(model.get_decoder().layers), processes)
    mine = BATCHES[processes.rank :: processes.size]
    passes = -(-len(BATCHES) // processes.size)
    for number in range(passes):
        reduce_gradients(root, at_once or number == passes - 1)
        if number < len(mine):
            loss = loss_of(root, mine[number]) * processes.size
        else:
            loss = root(torch.zeros((1, 2), dtype=torch.int64)).sum() * 0  # nothing left: takes part all the same
        loss.backward()
    found = gradients(model)
    flat = [torch.cat([part[name].flatten() for name in expected]) for part in (expected, found)]
    with torch.no_grad():
        same = torch.allclose(root(BATCHES[0]), alone(BATCHES[0]), atol=1e-5)
    return {
        "names": set(found) == set(expected),
        "error": float((flat[1] - flat[0]).norm() / flat[0].norm()),
        "same_forward": same,
        "share": sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters()),
    }


@pytest.mark.parametrize(
    ("architecture", "lora", "checkpointing", "at_once", "size"),
    [
        ("Qwen3", False, False, False, 2),
        ("Qwen3", False, True, True, 3),
        ("Qwen2", False, False, True, 2),
        ("Llama", True, False, False, 3),
        ("Qwen3Moe", False, True, False, 2),
    ],
)
def test_gradients_over_ranks_are_those_of_one(
    ranks: Ranks, architecture: str, lora: bool, checkpointing: bool, at_once: bool, size: int
) -> None:
    answers = ranks(
        compare, size=size, architecture=architecture, lora=lora, checkpointing=checkpointing, at_once=at_once
    )
    for answer in answers:
        assert answer["names"]
        assert answer["error"] < 1e-5
        assert answer["same_forward"]
        assert answer["share"] < 0.8
    assert sum(answer["share"] for answer in answers) == pytest.approx(1)


def half(processes: Processes) -> list[Any]:
    """Computes in bfloat16, and keeps weights, gradients and the numbers it is given in float32."""
    model, _ = model_of("Qwen3")
    seen: list[torch.dtype] = []

    class Spy(Root):
        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.extend([given["temperature"].dtype, self.model.lm_head.weight.dtype])
            return super().forward(given["ids"])

    root = Spy(model)
    shard(root, list(model.model.layers), processes, compute_dtype=torch.bfloat16)
    root({"ids": BATCHES[0], "temperature": torch.full((3,), 0.7)}).sum().backward()
    weights = {str(p.dtype) for p in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}
    return [[str(kind) for kind in seen], sorted(weights)]


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(ranks: Ranks) -> None:
    assert ranks(half) == [[["torch.float32", "torch.bfloat16"], ["torch.float32"]]] * 2


def summed_in(processes: Processes) -> list[str]:
    """What type gradients are summed in. Asked of FSDP, because gloo itself adds narrow types up in float32."""
    found = []
    for dtype, compute_dtype in ((torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float64, None)):
        layer = torch.nn.Linear(2, 3).to(dtype)
        root = torch.nn.Sequential(layer)
        shard(root, [layer], processes, compute_dtype=compute_dtype)
        root(torch.ones(1, 2, dtype=compute_dtype or dtype)).sum().backward()
        (group,) = fully_shard.state(layer)._fsdp_param_groups
        found.append(f"{group.fsdp_params[0].reduce_dtype or dtype} {layer.weight.grad.dtype}".replace("torch.", ""))
    return found


def test_narrow_gradients_are_summed_in_float32(ranks: Ranks) -> None:
    assert ranks(summed_in) == [["float32 bfloat16", "float32 float32", "float64 float64"]] * 2


def swap(processes: Processes) -> dict[str, bool]:
    model, _ = model_of("Qwen3")
    root = Root(model)
    shard(root, list(model.model.layers), processes)
    frozen = FrozenWeights(root.parameters())
    with torch.no_grad():
        before = root(BATCHES[0])
        for parameter in root.parameters():
            parameter.add_(0.3)
        changed = root(BATCHES[0])
        with frozen.in_place():
            inside = root(BATCHES[0])
        after = root(BATCHES[0])
        with pytest.raises(KeyError), frozen.in_place():
            raise KeyError
        end = root(BATCHES[0])
    return {
        "moved": not torch.allclose(before, changed),
        "inside": torch.equal(inside, before),
        "after": torch.equal(after, changed) and torch.equal(end, changed),
        "sharded": isinstance(root, FSDPModule) is (processes.size > 1),
    }


def test_frozen_weights_change_places_with_the_models(ranks: Ranks) -> None:
    good = {"moved": True, "inside": True, "after": True, "sharded": True}
    assert ranks(swap) == [good, good]
    assert swap(Processes.start("cpu", {})) == good
