from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stepgym.train.losses.ppo import ppo


def test_ppo_by_hand(tokens_of: Any, slopes: Any) -> None:
    #                  inside, above, below, inside, above, below
    tokens = tokens_of([1.1, 1.5, 0.5, 1.1, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    loss = ppo(tokens, clip_low=0.2, clip_high=0.3)
    assert loss.values.tolist() == pytest.approx([-2.2, -2.6, -1.0, 2.2, 3.0, 1.6])
    # The gradient is -ratio * A where the clip does not hold, else 0.
    assert slopes(tokens, loss) == pytest.approx([-2.2, 0.0, -1.0, 2.2, 3.0, 0.0])
    assert loss.metrics["clip_fraction_high"].tolist() == [False, True, False, False, False, False]
    assert loss.metrics["clip_fraction_low"].tolist() == [False, False, False, False, False, True]
    assert loss.metrics["ratio"].tolist() == pytest.approx([1.1, 1.5, 0.5, 1.1, 1.5, 0.5])


def test_clip_higher_lets_good_tokens_rise_further_and_changes_nothing_else(tokens_of: Any) -> None:
    tokens = tokens_of([1.25, 1.25, 0.5], [1.0, -1.0, -1.0])
    narrow, wide = ppo(tokens), ppo(tokens, clip_high=0.28)
    assert narrow.values.tolist() == pytest.approx([-1.2, 1.25, 0.8])
    assert wide.values.tolist() == pytest.approx([-1.25, 1.25, 0.8])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([10.0, 10.0, 2.0], [-1.0, 1.0, -1.0])
    loss = ppo(tokens, dual_clip=3.0)
    assert loss.values.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert slopes(tokens, loss) == pytest.approx([0.0, 0.0, 2.0])
    assert loss.metrics["clip_fraction_dual"].tolist() == [True, False, False]


def test_a_ratio_that_would_overflow_stays_finite(tokens_of: Any) -> None:
    tokens = tokens_of([1.0], [-1.0])
    far = dataclasses.replace(tokens, logprob=tokens.logprob + 1000)
    assert torch.isfinite(ppo(far).values).all()
