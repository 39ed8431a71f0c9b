"""Log-probabilities with a sharded head: its weights are freed after the forward pass and gathered on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgym.model.logprobs import token_scores
from stepgym.train.parallel.processes import Processes


class Model(torch.nn.Module):
    """A layer and a head, used within one `forward` as the trainer does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 30, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, chunk: int | None) -> torch.Tensor:
        return token_scores(self.layer(inputs), self.head.weight, targets, chunk_logits=chunk).logprob


def loss(model: torch.nn.Module, rank: int, chunk: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 6, generator=generator)
    targets = torch.randint(0, 30, (8,), generator=generator)
    logprobs: torch.Tensor = model(inputs, targets, chunk)
    return (logprobs * torch.arange(8)).sum()


def gradients_of_shards(
    processes: Processes, chunk: int | None, reshard: bool, frozen: bool
) -> list[list[float] | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    model.head.weight.requires_grad_(not frozen)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    loss(model, processes.rank, chunk).backward()
    grads: list[Any] = [p.grad for p in (model.layer.weight, model.head.weight)]
    return [None if g is None else (g.full_tensor() * 2).flatten().tolist() for g in grads]  # FSDP takes the mean


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("chunk", "frozen"), [(None, False), (60, False), (60, True)])
def test_gradients_are_those_of_one_process(
    ranks: Callable[..., list[Any]], chunk: int | None, reshard: bool, frozen: bool
) -> None:
    model = Model()
    model.head.weight.requires_grad_(not frozen)
    sum(loss(model, rank, chunk) for rank in range(2)).backward()  # type: ignore[union-attr]
    for found in ranks(gradients_of_shards, chunk=chunk, reshard=reshard, frozen=frozen):
        for ours, parameter in zip(found, (model.layer.weight, model.head.weight), strict=True):
            assert (ours is None) == (parameter.grad is None)
            if parameter.grad is not None:
                assert torch.allclose(torch.tensor(ours), parameter.grad.flatten(), atol=1e-5)
