"""Promise 11: Discounted turn returns with gamma = 1, a terminal reward only and trajectory-level baselines equal
outcome credit.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.credit import CREDITS
from stepgym.credit.group import GroupRewards

MEMBERS = st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 30)), min_size=1, max_size=8)
PAIRS = [
    ({"baseline": "mean", "scale_by_std": True}, "grpo", {}),
    ({"baseline": "mean", "scale_by_std": False}, "grpo", {"scale_by_std": False}),
    ({"baseline": "mean", "scale_by_std": False}, "dr_grpo", {}),
    ({"baseline": "leave_one_out", "scale_by_std": False}, "rloo", {}),
]


@pytest.mark.parametrize(("options", "outcome", "outcome_options"), PAIRS)
@given(MEMBERS)
def test_with_gamma_one_and_a_terminal_reward_it_is_outcome_credit(
    options: dict[str, object], outcome: str, outcome_options: dict[str, object], members: list[tuple[float, int]]
) -> None:
    steps = [np.array([0.0] * (turns - 1) + [reward]) for reward, turns in members]
    group = GroupRewards(np.array([reward for reward, _ in members]), steps)
    by_turn = CREDITS.get("turn_returns")(group, gamma=1.0, **options)
    by_outcome = CREDITS.get(outcome)(group, **outcome_options)
    for one, other in zip(by_turn, by_outcome, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


@given(MEMBERS)
def test_over_one_group_the_batchs_returns_are_outcome_credit_too(members: list[tuple[float, int]]) -> None:
    """REINFORCE++ sums rewards from each turn on; over a batch of one group that is GRPO, or Dr. GRPO unscaled."""
    if len(members) < 2:
        return
    steps = [np.array([0.0] * (turns - 1) + [reward]) for reward, turns in members]
    group = GroupRewards(np.array([reward for reward, _ in members]), steps)
    for over_batch, outcome in (
        ("reinforce_plus_plus", "grpo"), ("reinforce_plus_plus_baseline", "grpo"), ("reinforce", "dr_grpo"),
    ):  # fmt: skip
        (found,) = CREDITS.get(over_batch)([group])
        for one, other in zip(found, CREDITS.get(outcome)(group), strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_with_a_reward_on_the_way_it_is_not() -> None:
    group = GroupRewards(np.array([1.0, 0.0]), [np.array([1.0, 0.0]), np.array([0.0, 0.0])])
    advantages = CREDITS.get("turn_returns")(group)
    assert advantages[0][0] > advantages[0][1]
