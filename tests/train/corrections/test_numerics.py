"""Every correction, on inputs that nothing should bring out of order; and options that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.config import validate_kwargs
from stepgym.errors import UserError
from stepgym.train.corrections import CORRECTIONS
from stepgym.train.losses.tokens import Tokens, TokenWeights

CALLS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CORRECTIONS.names()),
    ("masked", {"high": None, "low": 0.0}),
    ("sequence_truncated", {"unit": "trajectory"}),
    ("geometric_mask", {"unit": "trajectory", "cap": None, "only_negative": True}),
]
LOGPROB = st.one_of(st.floats(-1e4, 0.0, width=32), st.just(float("-inf")))
SAMPLER = st.one_of(LOGPROB, st.just(float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CALLS)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(LOGPROB, SAMPLER, st.sampled_from([-1.0, 0.0, 2.0]), st.integers(0, 3)), max_size=12))
def test_weights_are_finite_and_zero_where_masked(
    name: str, options: dict[str, Any], dtype: torch.dtype, rows: list[tuple[float, float, float, int]]
) -> None:
    old, sampler, advantage = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(3))
    step = torch.tensor([row[3] for row in rows], dtype=torch.int64)
    tokens = Tokens(old, old, advantage, step, step // 2, step // 4, sampler)
    found: TokenWeights = CORRECTIONS.get(name)(tokens, **options)
    assert found.values.shape == old.shape
    assert found.values.dtype == dtype
    assert torch.isfinite(found.values).all()
    assert (found.values >= 0).all()
    if found.keep is not None:
        assert found.keep.dtype == torch.bool
        assert (found.values[~found.keep] == 0).all()
        assert (found.values[found.keep] > 0).all()
    for metric in found.metrics.values():
        assert metric.shape == old.shape
        assert torch.isfinite(metric.double()).all()


def test_where_sampler_and_trainer_agree_every_correction_leaves_all_as_it_is() -> None:
    old = torch.tensor([-0.1, -5.0, -2.0], dtype=torch.float64)
    step = torch.tensor([0, 0, 1])
    for name, options in CALLS:
        found = CORRECTIONS.get(name)(Tokens(old, old, -torch.ones_like(old), step, step, step, old), **options)
        assert found.values.tolist() == [1.0, 1.0, 1.0]
        assert found.keep is None or bool(found.keep.all())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("truncated", {"cap": 0}),
        ("truncated", {"unit": "step"}),
        ("sequence_truncated", {"unit": "batch"}),
        ("sequence_truncated", {"cap": -1}),
        ("masked", {"low": 1.0}),
        ("masked", {"high": 1.0}),
        ("masked", {"low": -0.1}),
        ("geometric_mask", {"low": 1.2}),
        ("geometric_mask", {"high": 0.9}),
        ("geometric_mask", {"caps": 2}),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="correction"):
        validate_kwargs(CORRECTIONS.get(name), options, "correction")


def test_the_registry_knows_its_entries_and_suggests() -> None:
    assert CORRECTIONS.names() == ["geometric_mask", "masked", "sequence_truncated", "truncated"]
    with pytest.raises(UserError, match=r"unknown correction 'truncate'; did you mean 'truncated'\?"):
        CORRECTIONS.get("truncate")
