from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from stepgym.train.corrections.masked import masked
from stepgym.train.corrections.truncated import truncated

NAN = math.nan


def test_truncated_importance_weights_by_hand(tokens_of: Any) -> None:
    found = truncated(tokens_of([0.5, 1.5, 5.0]), cap=2.0)
    assert found.values.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert found.keep is None
    assert found.metrics["importance_truncated"].tolist() == [False, False, True]


def test_only_what_lies_between_sampler_and_trainer_counts(tokens_of: Any) -> None:
    tokens = tokens_of([0.5, 1.5, 5.0])
    moved = dataclasses.replace(tokens, logprob=tokens.logprob.clone().add_(0.7).requires_grad_())
    assert truncated(moved).values.tolist() == truncated(tokens).values.tolist()
    assert not truncated(moved).values.requires_grad


def test_a_token_the_sampler_thought_impossible_gets_the_cap(tokens_of: Any) -> None:
    assert truncated(tokens_of([math.inf]), cap=2.0).values.tolist() == [2.0]


def test_a_token_the_trainer_thinks_impossible_gets_next_to_no_weight(tokens_of: Any) -> None:
    assert truncated(tokens_of([0.0])).values.tolist() == pytest.approx([math.exp(-20)])


def test_where_both_agree_that_a_token_is_impossible_there_is_no_gap(tokens_of: Any) -> None:
    never = torch.tensor([-math.inf], dtype=torch.float64)
    tokens = dataclasses.replace(tokens_of([1.0]), old_logprob=never, sampler_logprob=never)
    assert truncated(tokens).values.tolist() == [1.0]


def test_tokens_without_a_sampler_logprob_have_weight_one_and_are_counted(tokens_of: Any) -> None:
    tokens = tokens_of([NAN, 0.3, 9.0])
    capped = truncated(tokens, cap=0.5)  # even where the cap is lower than 1
    assert capped.values.tolist() == pytest.approx([1.0, 0.3, 0.5])
    assert capped.metrics["importance_missing"].tolist() == [True, False, False]
    assert capped.metrics["importance_truncated"].tolist() == [False, False, True]
    left = masked(tokens)
    assert left.values.tolist() == [1.0, 0.0, 0.0]
    assert left.keep is not None
    assert left.keep.tolist() == [True, False, False]


def test_masked_is_icepop_by_hand(tokens_of: Any) -> None:
    found = masked(tokens_of([0.49, 0.51, 1.0, 4.9, 5.1]))
    assert found.values.tolist() == pytest.approx([0.0, 0.51, 1.0, 4.9, 0.0])
    assert found.keep is not None
    assert found.keep.tolist() == [False, True, True, True, False]
    assert found.metrics["importance_masked"].tolist() == [True, False, False, False, True]


def test_masking_without_weights_and_with_one_bound_only(tokens_of: Any) -> None:
    tokens = tokens_of([0.01, 0.6, 1.9, 2.1, 1e6])
    assert masked(tokens, low=0.5, high=2.0, weigh=False).values.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert masked(tokens, low=0.0, high=2.0).values.tolist() == pytest.approx([0.01, 0.6, 1.9, 0.0, 0.0])
    assert masked(tokens, low=0.5, high=None).values.tolist() == pytest.approx([0.0, 0.6, 1.9, 2.1, 1e6])
