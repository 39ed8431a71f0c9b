from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from stepgym.train.losses.gspo import gspo
from stepgym.train.losses.ppo import ppo

WIDE = {"clip_low": 0.2, "clip_high": 0.3}


def test_gspo_of_steps_by_hand_with_tokens_that_do_not_stand_side_by_side(tokens_of: Any, slopes: Any) -> None:
    # Step 0: ratios 1.21 and 1.0, so s = sqrt(1.21) = 1.1, inside. Step 1: 4 and 1, s = 2, above. Step 2: 0.25, below.
    tokens = tokens_of([1.21, 4.0, 0.25, 1.0, 1.0], [2.0, 3.0, 1.0, 2.0, 3.0], step=[0, 1, 2, 0, 1])
    loss = gspo(tokens, **WIDE)
    assert loss.values.tolist() == pytest.approx([-2.2, -3.9, -0.25, -2.2, -3.9])
    assert slopes(tokens, loss) == pytest.approx([-2.2, 0.0, -0.25, -2.2, 0.0])
    assert loss.metrics["ratio"].tolist() == pytest.approx([1.1, 2.0, 0.25, 1.1, 2.0])
    assert loss.metrics["clip_fraction_high"].tolist() == [False, True, False, False, True]


def test_gspo_of_trajectories_by_hand(tokens_of: Any, slopes: Any) -> None:
    # Trajectory 0 has steps 0 and 2, trajectory 1 has step 1. s0 = (1.21 * 1 * 0.25)^(1/3), s1 = 2.
    tokens = tokens_of(
        [1.21, 4.0, 0.25, 1.0, 1.0], [-1.0, -3.0, -1.0, -1.0, -3.0], step=[0, 1, 2, 0, 1], trajectory=[0, 1, 0, 0, 1]
    )
    s0 = math.cbrt(0.3025)  # below 1 - 0.2
    loss = gspo(tokens, unit="trajectory", **WIDE)
    assert s0 < 0.8
    assert loss.values.tolist() == pytest.approx([0.8, 6.0, 0.8, 0.8, 6.0])
    assert slopes(tokens, loss) == pytest.approx([0.0, 6.0, 0.0, 0.0, 6.0])
    assert loss.metrics["ratio"].tolist() == pytest.approx([s0, 2.0, s0, s0, 2.0])
    assert loss.metrics["clip_fraction_low"].tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_the_form_for_tokens_has_the_value_and_the_gradient_of_the_paper(
    tokens_of: Any, slopes: Any, unit: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    count = 40
    step = torch.randint(0, 9, (count,), generator=generator)
    trajectory = step // 3
    units = step if unit == "step" else trajectory
    of_unit = torch.randn(9, generator=generator, dtype=torch.float64)
    ratio = torch.exp(0.4 * torch.randn(count, generator=generator, dtype=torch.float64))
    tokens = tokens_of(ratio.tolist(), of_unit[units].tolist(), step=step.tolist(), trajectory=trajectory.tolist())
    names = units.unique()
    sizes = torch.tensor([int((units == name).sum()) for name in names], dtype=torch.float64)
    weight = 1 / (len(names) * sizes[torch.searchsorted(names, units)])  # mean over units of means over tokens
    loss = gspo(tokens, unit=unit, **WIDE)
    found = slopes(tokens, loss, weight)

    # Equation 5 as it is written: one differentiable ratio per sequence.
    logprob = tokens.logprob.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for name in names:
        inside = units == name
        s = torch.exp((logprob[inside] - tokens.old_logprob[inside]).sum() / inside.sum())
        advantage = of_unit[name]
        total = total - torch.minimum(s * advantage, torch.clamp(s, 0.8, 1.3) * advantage) / len(names)
    (expected,) = torch.autograd.grad(total, logprob)
    assert (loss.values * weight).sum().item() == pytest.approx(total.item())
    assert found == pytest.approx(expected.tolist())
    assert 0 < sum(value == 0 for value in found) < count  # some units are clipped and some are not


def test_tokens_of_one_sequence_with_advantages_of_their_own_are_gspo_token(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.21, 1.0], [1.0, -2.0], step=[0, 1])
    loss = gspo(tokens, unit="trajectory", **WIDE)
    assert loss.values.tolist() == pytest.approx([-1.1, 2.2])
    assert slopes(tokens, loss) == pytest.approx([-1.1, 2.2])  # s * A of its own step, not a mix of both


def test_steps_of_one_token_are_ppo(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.1, 1.5, 0.5, 1.5], [2.0, 2.0, -2.0, -2.0], step=[3, 1, 0, 7])
    assert gspo(tokens, **WIDE).values.tolist() == pytest.approx(ppo(tokens, **WIDE).values.tolist())
    assert slopes(tokens, gspo(tokens, **WIDE)) == pytest.approx(slopes(tokens, ppo(tokens, **WIDE)))


def test_a_unit_is_the_same_in_any_company_and_order(tokens_of: Any) -> None:
    ratio, advantage, step = [1.2, 0.9, 1.4, 1.0, 0.7], [1.0, -1.0, 1.0, -1.0, 1.0], [0, 1, 0, 1, 0]
    whole = gspo(tokens_of(ratio, advantage, step=step), **WIDE).values
    for chosen in ([0, 2, 4], [4, 0, 2], [3, 1]):
        part = tokens_of([ratio[i] for i in chosen], [advantage[i] for i in chosen], step=[step[i] for i in chosen])
        assert gspo(part, **WIDE).values.tolist() == pytest.approx(whole[chosen].tolist())


def test_the_default_range_is_the_narrow_one_of_the_paper(tokens_of: Any) -> None:
    tokens = tokens_of([1.0005, 1.0003, 0.9996, 0.9998], [1.0, 1.0, -1.0, -1.0], step=[0, 1, 2, 3])
    loss = gspo(tokens)
    assert loss.metrics["clip_fraction_high"].tolist() == [True, False, False, False]
    assert loss.metrics["clip_fraction_low"].tolist() == [False, False, True, False]


def test_one_wild_token_does_not_make_its_sequence_infinite(tokens_of: Any) -> None:
    tokens = tokens_of([1.0, 1.0], [-1.0, -1.0])
    far = dataclasses.replace(tokens, logprob=tokens.logprob + torch.tensor([1e6, 0.0], dtype=torch.float64))
    assert gspo(far).metrics["ratio"].tolist() == pytest.approx([math.exp(10)] * 2)  # the mean of 20 and 0
