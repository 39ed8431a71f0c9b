from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stepgym.train.optimizer import Optimizer, OptimizerConfig, clip_gradients
from stepgym.train.parallel.processes import Processes
from stepgym.train.parallel.sharding import shard


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)])
        self.head = torch.nn.Linear(5, 1, bias=False)  # fewer rows than ranks: some ranks hold nothing of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


CONFIG = OptimizerConfig(learning_rate=0.05, weight_decay=0.1, max_grad_norm=0.3)


def steps(net: Net, optimizer: Optimizer, rank: int, size: int) -> list[float]:
    norms = []
    for number in range(4):
        data = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
        (net(data[rank::size]).square().sum() * size).backward()
        norms.append(optimizer.step())
    return norms


def weights(net: Net) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def train(processes: Processes) -> dict[str, Any]:
    net = Net()
    shard(net, list(net.layers), processes)
    optimizer = Optimizer(net.named_parameters(), CONFIG)
    norms = steps(net, optimizer, processes.rank, processes.size)
    moments = optimizer.state_dict()["adamw"]["head.weight"]["exp_avg"]
    return {"norms": norms, "weights": weights(net), "held": moments.to_local().numel()}


def test_steps_over_ranks_are_those_of_one(ranks: Callable[..., list[Any]]) -> None:
    net = Net()
    norms = steps(net, Optimizer(net.named_parameters(), CONFIG), 0, 1)
    assert max(norms) > 0.3  # clipping is at work
    for size in (2, 3):
        answers = ranks(train, size=size)
        for answer in answers:
            torch.testing.assert_close(answer["norms"], norms, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(answer["weights"], weights(net), rtol=1e-5, atol=1e-6)
        assert sum(answer["held"] for answer in answers) == 5


def mixed(processes: Processes) -> list[Any]:
    net = Net()
    shard(net, list(net.layers), processes)
    net(torch.ones(2, 5)).sum().backward()
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([30.0, 40.0])
    before = torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()]).norm()
    norm = clip_gradients([*net.parameters(), plain], 1.0)
    after = torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()] + [plain.grad]).norm()
    return [float((before**2 + 2500).sqrt()), norm, float(after)]


def test_a_norm_over_sharded_and_plain_parameters(ranks: Callable[..., list[Any]]) -> None:
    for expected, norm, after in ranks(mixed):
        assert abs(norm - expected) < 1e-4
        assert abs(after - 1.0) < 1e-4
