"""Estimators that look at all groups of a batch, and the KL in the reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.credit import CREDITS
from stepgym.credit.group import Advantages, GroupRewards, assign_all
from stepgym.credit.kl_in_reward import lower_rewards
from stepgym.credit.level import level
from stepgym.record.step import Step


def group_of(*step_rewards: Sequence[float]) -> GroupRewards:
    arrays = [np.array(rewards, dtype=np.float64) for rewards in step_rewards]
    return GroupRewards(np.array([rewards.sum() for rewards in arrays]), arrays)


def lists(groups: Sequence[Advantages]) -> list[list[list[float]]]:
    return [[steps.tolist() for steps in group] for group in groups]


THIRTY = [0.0] * 30


def test_reinforce_plus_plus_by_hand() -> None:
    # Rewards 1, 0, 1, 1, each trajectory once: mean 0.75, variance (3 * 0.0625 + 0.5625) / 3 = 0.25.
    groups = [group_of([1.0], THIRTY), group_of([0.0, 1.0], [1.0])]
    found = assign_all(CREDITS.get("reinforce_plus_plus"), groups, {})
    assert found[0][0] == pytest.approx([0.25 / 0.500001])
    assert found[0][1] == pytest.approx([-0.75 / 0.500001] * 30)
    assert found[1][0] == pytest.approx([0.25 / 0.500001] * 2)
    assert found[1][1] == pytest.approx([0.25 / 0.500001])


def test_reinforce_plus_plus_with_rewards_on_the_way_and_a_discount_by_hand() -> None:
    # gamma 0.5: returns [1 + 0.5 * 2, 2] = [2, 2], and [-1 - 0.5 * 2, -2] = [-2, -2]; mean 0, variance 4 + 4.
    groups = [group_of([1.0, 2.0]), group_of([-1.0, -2.0])]
    found = assign_all(CREDITS.get("reinforce_plus_plus"), groups, {"gamma": 0.5})
    assert found[0][0] == pytest.approx([2 / (8**0.5 + 1e-6)] * 2)
    # gamma 1: returns [3, 2] and [-3, -2]; mean 0; (9 + 4) / 2 twice, over n - 1 = 1.
    found = assign_all(CREDITS.get("reinforce_plus_plus"), groups, {})
    assert found[1][0] == pytest.approx(np.array([-3, -2]) / (13**0.5 + 1e-6))


def test_reinforce_plus_plus_with_zero_variance_or_one_trajectory_is_zero() -> None:
    for groups in ([group_of([0.5], [0.0, 0.5]), group_of([0.5])], [group_of([0.0, 3.0])]):
        found = assign_all(CREDITS.get("reinforce_plus_plus"), groups, {})
        assert all(value == 0 for group in lists(found) for steps in group for value in steps)


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Less the groups' means: 0.5, -0.5 and 0, 0; mean 0, variance (0.25 + 0.25) / 3. The group of one is left out.
    groups = [group_of([1.0], THIRTY), group_of([0.0, 2.0], [2.0]), group_of([0.0, 7.0])]
    found = assign_all(CREDITS.get("reinforce_plus_plus_baseline"), groups, {})
    value = 0.5 / (np.sqrt(0.5 / 3) + 1e-6)
    assert found[0][0] == pytest.approx([value])
    assert found[0][1] == pytest.approx([-value] * 30)
    assert lists(found[1:]) == [[[0.0, 0.0], [0.0]], [[0.0, 0.0]]]


def test_reinforce_by_hand() -> None:
    # Rewards -1, 0, 4, mean 1, each trajectory once.
    groups = [group_of([-1.0], THIRTY), group_of([0.0, 4.0])]
    found = assign_all(CREDITS.get("reinforce"), groups, {})
    assert lists(found) == [[[-2.0], [-1.0] * 30], [[3.0, 3.0]]]
    found = assign_all(CREDITS.get("reinforce"), groups, {"baseline": "none", "gamma": 0.5})
    assert lists(found) == [[[-1.0], [0.0] * 30], [[2.0, 4.0]]]


# ---- what holds for every estimator ---------------------------------------------------------------------------------

MEMBERS = st.lists(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), st.integers(0, 2)), max_size=4), min_size=1, max_size=5
)


def drawn_group(members: list[list[tuple[float, int]]]) -> GroupRewards:
    group = group_of(*[[reward for reward, _ in steps] for steps in members])
    prompts = [[Step(prompt_ids=[state], response_ids=[1]) for _, state in steps] for steps in members]
    return GroupRewards(group.rewards, group.step_rewards, prompts)


@given(st.lists(MEMBERS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_groups_and_members_changes_nothing(batch: list[list[list[tuple[float, int]]]], random) -> None:  # type: ignore[no-untyped-def]
    order = random.sample(range(len(batch)), len(batch))
    orders = [random.sample(range(len(members)), len(members)) for members in batch]
    groups = [drawn_group(members) for members in batch]
    shuffled = [drawn_group([batch[g][m] for m in orders[g]]) for g in order]
    for name in CREDITS:
        credit = CREDITS.get(name)
        if level(credit) == "token":
            continue
        found, again = assign_all(credit, groups, {}), assign_all(credit, shuffled, {})
        for place, g in enumerate(order):
            for position, m in enumerate(orders[g]):
                assert again[place][position] == pytest.approx(found[g][m], rel=1e-6, abs=1e-6), name


# ---- the KL in the reward -------------------------------------------------------------------------------------------


def test_rewards_pay_for_the_kl_of_each_step() -> None:
    group = group_of([0.0, 1.0], [0.5], [])
    kl = [np.array([2.0, -1.0]), np.array([4.0]), np.array([])]
    lowered = lower_rewards(group, kl, 0.125)
    assert [rewards.tolist() for rewards in lowered.step_rewards] == [[-0.25, 1.125], [0.0], []]
    assert lowered.rewards.tolist() == [0.875, 0.0, 0.0]
    assert group.rewards.tolist() == [1.0, 0.5, 0.0]
    assert lower_rewards(group, kl, 0.0).rewards.tolist() == group.rewards.tolist()
    with pytest.raises(ValueError, match="not as many"):
        lower_rewards(group, kl[:2], 0.1)


@given(MEMBERS, st.floats(0, 2), st.data())
def test_lowered_step_rewards_still_sum_to_the_reward(
    members: list[list[tuple[float, int]]], coef: float, data: st.DataObject
) -> None:
    group = drawn_group(members)
    kl = [np.array(data.draw(st.lists(st.floats(-5, 5), min_size=len(m), max_size=len(m)))) for m in members]
    lowered = lower_rewards(group, kl, coef)
    assert [rewards.sum() for rewards in lowered.step_rewards] == pytest.approx(lowered.rewards.tolist(), abs=1e-9)
    assert lowered.steps is group.steps
