from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from stepgym.config import validate
from stepgym.errors import UserError
from stepgym.train.losses.reduction import ReductionConfig, token_weights

# Group 0: trajectory 0 with steps of 1 and 3 tokens. Group 1: trajectories 1 and 2 with steps of 2 and 2 tokens.
UNITS = {
    "step": np.array([0, 1, 1, 1, 2, 2, 3, 3]),
    "trajectory": np.array([0, 0, 0, 0, 1, 1, 2, 2]),
    "group": np.array([0, 0, 0, 0, 1, 1, 1, 1]),
}


def test_reductions_by_hand() -> None:
    assert token_weights("token", **UNITS) == pytest.approx([1 / 8] * 8)
    assert token_weights("step", **UNITS) == pytest.approx([1 / 4, *[1 / 12] * 3, *[1 / 8] * 4])
    assert token_weights("trajectory", **UNITS) == pytest.approx([*[1 / 12] * 4, *[1 / 6] * 4])
    assert token_weights("group", **UNITS) == pytest.approx([1 / 8] * 8)
    assert token_weights("constant", tokens=10, **UNITS) == pytest.approx([1 / 30] * 8)


def test_constant_weighs_a_token_alike_in_long_and_short_trajectories_and_batches() -> None:
    # Dr. GRPO: the same token has the same weight whether its own trajectory is long or short, and, unlike with
    # `token`, whether the others are.
    alone = {"step": np.array([0]), "trajectory": np.array([0]), "group": np.array([0])}
    longer = {name: np.zeros(50, dtype=np.int64) for name in alone}
    for units in (alone, longer):
        assert token_weights("constant", tokens=100, **units) == pytest.approx([1 / 100] * len(units["step"]))
    with pytest.raises(ValueError, match="needs a number of tokens"):
        token_weights("constant", **UNITS)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_weights_sum_to_one_and_units_weigh_alike(places: list[tuple[int, int, int]]) -> None:
    names = ("group", "trajectory", "step")
    numbers: list[dict[tuple[int, ...], int]] = [{}, {}, {}]
    units = {
        name: np.array([known.setdefault(p[: depth + 1], len(known)) for p in places], dtype=np.int64)
        for depth, (name, known) in enumerate(zip(names, numbers, strict=True))
    }
    for name in ("token", "step", "trajectory", "group"):
        weights = token_weights(name, **units)
        assert weights.sum() == pytest.approx(1.0 if places else 0.0)
        if name != "token" and places:
            totals = np.bincount(units[name], weights)
            assert totals == pytest.approx(np.full(len(totals), 1 / len(totals)))
    weights = token_weights("constant", tokens=7, **units)
    assert weights.sum() == pytest.approx(len(places) / (7 * max(1, len(numbers[1]))))


class Settings(BaseModel):
    reduction: ReductionConfig = ReductionConfig()


def test_a_reduction_is_a_name_or_a_mapping() -> None:
    assert validate(Settings, {}, "algorithm").reduction == ReductionConfig(kind="trajectory")
    assert validate(Settings, {"reduction": "token"}, "algorithm").reduction.kind == "token"
    constant = validate(Settings, {"reduction": {"kind": "constant", "tokens": 10}}, "algorithm").reduction
    assert constant.weights(**UNITS) == pytest.approx([1 / 30] * 8)
    assert ReductionConfig(kind="step").weights(**UNITS) == pytest.approx(token_weights("step", **UNITS))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ("constant", r"algorithm.reduction: kind 'constant' needs 'tokens'"),
        ({"kind": "token", "tokens": 5}, r"algorithm.reduction: 'tokens' has no effect with kind 'token'"),
        ({"kind": "constant", "tokens": 0}, r"algorithm.reduction.tokens: expected"),
        ("tokens", r"algorithm.reduction.*'token'"),
        ({"kind": "constant", "token": 5}, r"algorithm.reduction.*did you mean 'tokens'"),
    ],
)
def test_a_reduction_that_cannot_work_is_refused_in_one_line(given_: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        validate(Settings, {"reduction": given_}, "algorithm")
    assert "\n" not in str(refused.value)
