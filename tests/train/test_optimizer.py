from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.train.optimizer import Optimizer, OptimizerConfig, clip_gradients

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.1, warmup_updates=2, max_grad_norm=0.5)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "vector": (4,), "unused": (2, 2), "frozen": (2,)}
    made = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    made["frozen"].requires_grad_(False)
    return made


def step(made: dict[str, torch.nn.Parameter], optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for name in ("matrix", "vector"):
        made[name].grad = torch.randn(made[name].shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("before", [0, 3])
def test_a_state_taken_up_gives_the_bit_identical_next_steps(before: int) -> None:
    unbroken = parameters()
    first = Optimizer(unbroken.items(), CONFIG)
    for number in range(before):
        step(unbroken, first, number)
    kept = copy.deepcopy(first.state_dict())
    assert set(kept["adamw"]) == {"matrix", "vector", "unused"}
    resumed = parameters()
    second = Optimizer(resumed.items(), CONFIG)
    step(resumed, second, 99)  # it has a past of its own
    for name, parameter in resumed.items():
        parameter.data.copy_(unbroken[name].data)
    second.load_state_dict(kept)
    for number in range(before, before + 3):
        step(unbroken, first, number)
        step(resumed, second, number)
    assert first.updates == second.updates == before + 3
    for name, parameter in unbroken.items():
        assert torch.equal(parameter, resumed[name]), name


def test_the_tensors_of_a_state_are_the_live_ones() -> None:
    made = parameters()
    optimizer = Optimizer(made.items(), CONFIG)
    optimizer.state_dict()["adamw"]["matrix"]["exp_avg"].fill_(5.0)
    assert optimizer.state_dict()["adamw"]["matrix"]["exp_avg"].mean() == 5.0


def test_the_state_of_other_parameters_is_refused_before_anything_changes() -> None:
    made = parameters()
    optimizer = Optimizer(made.items(), CONFIG)
    step(made, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    without = copy.deepcopy(before)
    del without["adamw"]["unused"]
    with pytest.raises(ValueError, match="other parameters: unused"):
        optimizer.load_state_dict(without)
    wider = copy.deepcopy(before)
    wider["adamw"]["vector"]["exp_avg_sq"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"exp_avg_sq of vector is \[5\] in the state and \[4\] here"):
        optimizer.load_state_dict(wider)
    after = optimizer.state_dict()
    assert after["updates"] == 1
    for name, parts in after["adamw"].items():
        for key, tensor in parts.items():
            assert torch.equal(tensor, before["adamw"][name][key])


def test_clipping_by_hand() -> None:
    one, two, none = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    one.grad, two.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients([one, two, none], 10.0) == 5.0
    assert one.grad.tolist() == [3.0, 0.0]
    assert clip_gradients(iter([one, two, none]), 1.0) == 5.0
    assert one.grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-5)
    assert two.grad.tolist() == pytest.approx([0.0, 0.8], rel=1e-5)
    assert clip_gradients([none], 1.0) == 0.0
    two.grad[0] = math.inf
    assert math.isinf(clip_gradients([one, two], 1.0))


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=4))
def test_after_clipping_the_norm_is_at_most_the_limit(gradients: list[list[float]]) -> None:
    made = []
    for values in gradients:
        made.append(torch.nn.Parameter(torch.zeros(len(values))))
        made[-1].grad = torch.tensor(values)
    before = math.sqrt(sum(value**2 for values in gradients for value in values))
    assert clip_gradients(made, 2.0) == pytest.approx(before, rel=1e-4, abs=1e-20)
    assert math.sqrt(sum(float(p.grad.square().sum()) for p in made)) <= 2.0 * (1 + 1e-5)
