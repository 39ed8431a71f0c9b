from __future__ import annotations

import math
from typing import Any

import pytest

from stepgym.train.corrections.geometric_mask import geometric_mask
from stepgym.train.corrections.sequence_truncated import sequence_truncated

NAN = math.nan
# Steps 0 and 2 are trajectory 0, step 1 is trajectory 1. No unit's tokens stand side by side.
UNITS = {"step": [0, 1, 2, 0, 1, 2], "trajectory": [0, 1, 0, 0, 1, 0]}


def test_sequence_truncated_multiplies_over_a_step(tokens_of: Any) -> None:
    found = sequence_truncated(tokens_of([0.5, 1.2, 3.0, 0.8, 1.5, 2.0], **UNITS), cap=2.0)
    assert found.values.tolist() == pytest.approx([0.4, 1.8, 2.0, 0.4, 1.8, 2.0])
    assert found.keep is None
    assert found.metrics["importance_truncated"].tolist() == [False, False, True, False, False, True]


def test_sequence_truncated_multiplies_over_a_trajectory(tokens_of: Any) -> None:
    found = sequence_truncated(tokens_of([0.5, 1.2, 3.0, 0.8, 1.5, 2.0], **UNITS), cap=2.0, unit="trajectory")
    assert found.values.tolist() == pytest.approx([2.0, 1.8, 2.0, 2.0, 1.8, 2.0])  # 0.5 * 3 * 0.8 * 2 = 2.4
    assert found.metrics["importance_truncated"].tolist() == [True, False, True, True, False, True]


def test_a_token_without_a_sampler_logprob_leaves_the_product_alone(tokens_of: Any) -> None:
    found = sequence_truncated(tokens_of([NAN, NAN, 0.5], step=[0, 1, 0]))
    assert found.values.tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert found.metrics["importance_missing"].tolist() == [True, True, False]


def test_a_long_sequence_of_large_ratios_stays_finite(tokens_of: Any) -> None:
    assert sequence_truncated(tokens_of([1e6] * 100)).values.tolist() == [2.0] * 100
    assert sequence_truncated(tokens_of([1e-6] * 100)).values.tolist() == pytest.approx([math.exp(-20)] * 100)


def test_geometric_mask_of_steps_by_hand(tokens_of: Any) -> None:
    # Geometric means: step 0: sqrt(4 * 0.25) = 1, step 1: sqrt(1.21) = 1.1, step 2: sqrt(0.81) = 0.9.
    tokens = tokens_of([4.0, 1.21, 0.81, 0.25, 1.0, 1.0], **UNITS)
    found = geometric_mask(tokens, low=0.95, high=1.2)
    assert found.keep is not None
    assert found.keep.tolist() == [True, True, False, True, True, False]
    assert found.values.tolist() == pytest.approx([2.0, 1.21, 0.0, 0.25, 1.0, 0.0])  # per token, capped at 2
    assert found.metrics["importance_masked"].tolist() == [False, False, True, False, False, True]
    assert found.metrics["importance_truncated"].tolist() == [True, False, False, False, False, False]
    plain = geometric_mask(tokens, low=0.85, high=1.05, cap=None)
    assert plain.values.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert "importance_truncated" not in plain.metrics


def test_geometric_mask_of_trajectories_by_hand(tokens_of: Any) -> None:
    # Trajectory 0: (4 * 0.81 * 0.25 * 1)^(1/4) = 0.81^(1/4) = 0.9487; trajectory 1: 1.1.
    tokens = tokens_of([4.0, 1.21, 0.81, 0.25, 1.0, 1.0], **UNITS)
    found = geometric_mask(tokens, low=0.94, high=1.05, cap=None, unit="trajectory")
    assert found.values.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert geometric_mask(tokens, low=0.95, high=None, cap=None, unit="trajectory").values.tolist() == [
        0.0, 1.0, 0.0, 0.0, 1.0, 0.0,
    ]  # fmt: skip


def test_the_mean_does_not_grow_with_the_length(tokens_of: Any) -> None:
    for count in (1, 10, 1000):
        assert geometric_mask(tokens_of([1.005] * count)).values.tolist() == pytest.approx([1.005] * count)
        assert geometric_mask(tokens_of([1.02] * count)).values.tolist() == [0.0] * count


def test_only_tokens_that_are_pushed_away_can_be_masked_alone(tokens_of: Any) -> None:
    tokens = tokens_of([0.5, 0.5, 0.5, 3.0], step=[0, 1, 2, 3], advantage=[1.0, -1.0, 0.0, -1.0])
    found = geometric_mask(tokens, low=0.9, high=None, cap=None, only_negative=True)
    assert found.values.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_the_mean_is_over_tokens_with_a_sampler_logprob(tokens_of: Any) -> None:
    # Step 0: mean of log(1.1) alone, not halved by the unknown token. Step 1 has nothing to judge by.
    found = geometric_mask(tokens_of([1.1, NAN, NAN], step=[0, 0, 1]), low=0.9, high=1.06, cap=2.0)
    assert found.values.tolist() == [0.0, 0.0, 1.0]
    assert geometric_mask(tokens_of([1.1, NAN], step=[0, 0]), low=0.9, high=1.11, cap=0.5).values.tolist() == [0.5, 1.0]
