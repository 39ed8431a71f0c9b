"""Compiled layers that are sharded: the hooks that gather their weights stay outside of what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgym.train import compile as module
from stepgym.train.parallel.processes import Processes


def gradients(processes: Processes, compiled: bool) -> tuple[list[float], int]:
    """Of a sharded two-layer model on a forest; and how often a layer was compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from stepgym.train.attention import segments
    from stepgym.train.forward_module import ForwardModule, decoder_layers
    from stepgym.train.packs.micro_batch import MicroBatch, Tree
    from stepgym.train.parallel.sharding import shard

    counting = CompileCounterWithBackend("aot_eager")
    module._compiled = lambda forward: torch.compile(forward, backend=counting)  # type: ignore[assignment]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    forward_module = ForwardModule(Qwen3ForCausalLM(config), segments)
    layers = decoder_layers(forward_module.model)
    shard(forward_module, layers, processes, compute_dtype=None)
    if compiled:
        module.compile_layers(layers)
    for _ in range(2):
        forward_module.zero_grad()
        tree = Tree.of(torch.tensor([12] * 5 + [8] * 3 + [12] * 4).int().numpy())
        place = torch.arange(11)
        micro_batch = MicroBatch(
            ids=torch.arange(12)[None] + processes.rank,
            position=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]]),
            tree=tree,
            place=place,
            target=place + 1,
            temperature=None,
            token=place,
        )
        forward_module(micro_batch).logprob.sum().backward()
    found: list[Any] = [p.grad for p in forward_module.parameters()]
    return torch.cat([g.full_tensor().flatten() for g in found]).tolist(), counting.frame_count


@pytest.mark.slow
def test_gradients_are_those_of_sharded_plain_layers(ranks: Callable[..., list[Any]]) -> None:
    plain, compiled = ([*ranks(gradients, compiled=flag)] for flag in (False, True))
    for (expected, none), (found, some) in zip(plain, compiled, strict=True):
        assert none == 0
        assert some > 0
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-5)
