"""What the learner asks of any estimator: how it is called, what it may return, whether a group has signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stepgym.credit import CREDITS
from stepgym.credit.group import GroupRewards, assign, assign_all, has_signal
from stepgym.credit.level import group_baseline, has_group_baseline, level, over_batch, over_tokens
from stepgym.credit.refused import CreditRegistry
from stepgym.record.step import Step


def group_of(*step_rewards: Sequence[float]) -> GroupRewards:
    """A group with the steps that gigpo asks for: each prompt is new, except that all begin alike."""
    arrays = [np.array(rewards, dtype=np.float64) for rewards in step_rewards]
    steps = [
        [Step(prompt_ids=[0] if turn == 0 else [1, member, turn], response_ids=[5]) for turn in range(len(rewards))]
        for member, rewards in enumerate(arrays)
    ]
    return GroupRewards(np.array([rewards.sum() for rewards in arrays]), arrays, steps)


STEPWISE = sorted(name for name in CREDITS if level(CREDITS.get(name)) != "token")
COMPARING = [
    "dr_grpo",
    "gigpo",
    "grpo",
    "maxrl",
    "reinforce_plus_plus_baseline",
    "rloo",
    "step_rewards",
    "turn_returns",
]


def test_each_estimator_says_what_it_looks_at() -> None:
    levels = {name: level(CREDITS.get(name)) for name in CREDITS}
    assert {name for name, found in levels.items() if found == "token"} == {"gae"}
    assert {name for name, found in levels.items() if found == "batch"} == {
        "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    }  # fmt: skip
    assert [name for name in sorted(CREDITS) if has_group_baseline(CREDITS.get(name), {})] == COMPARING
    assert not has_group_baseline(CREDITS.get("step_rewards"), {"normalise": "none"})


def test_a_declaration_may_depend_on_options() -> None:
    @group_baseline(True, centre="group")
    @over_batch
    def mine(groups: Sequence[GroupRewards], *, centre: str = "none") -> list[list[np.ndarray]]:
        raise NotImplementedError

    assert level(mine) == "batch"
    assert has_group_baseline(mine, {"centre": "group"})
    assert not has_group_baseline(mine, {})


def test_a_declaration_for_an_option_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="group_baseline: mine has no option 'centre'"):

        @group_baseline(False, centre="none")
        def mine(group: GroupRewards) -> list[np.ndarray]:
            raise NotImplementedError


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_gets_zero_on_every_step_and_has_no_signal(name: str) -> None:
    groups = [group_of([0.0, 0.0, 5.0]), group_of([1.0], [0.0, 0.0])]
    advantages = assign_all(CREDITS.get(name), groups, {})
    assert advantages[0][0].tolist() == [0.0, 0.0, 0.0]
    assert not has_signal(groups[0], advantages[0], CREDITS.get(name))
    assert has_signal(groups[1], advantages[1], CREDITS.get(name))


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus"])
def test_a_group_of_one_or_of_equal_rewards_teaches_under_the_batchs_baseline(name: str) -> None:
    groups = [group_of([1.0]), group_of([0.0, 1.0], [1.0]), group_of([0.0], [0.0])]
    advantages = assign_all(CREDITS.get(name), groups, {})
    assert all(has_signal(g, a, CREDITS.get(name)) for g, a in zip(groups, advantages, strict=True))
    assert advantages[0][0][0] > 0 > advantages[2][1][0]
    same = [group_of([1.0]), group_of([0.0, 1.0], [1.0])]
    advantages = assign_all(CREDITS.get(name), same, {})
    assert not any(has_signal(g, a, CREDITS.get(name)) for g, a in zip(same, advantages, strict=True))


def test_raw_rewards_teach_whatever_the_others_got() -> None:
    for name, options in (("step_rewards", {"normalise": "none"}), ("reinforce", {"baseline": "none"})):
        groups = [group_of([1.0, 1.0]), group_of([1.0], [1.0]), group_of([0.0], [0.0, 0.0])]
        advantages = assign_all(CREDITS.get(name), groups, options)
        found = [has_signal(g, a, CREDITS.get(name), options) for g, a in zip(groups, advantages, strict=True)]
        assert found == [True, True, False]


def test_rewards_within_the_tolerance_have_no_signal() -> None:
    for name in COMPARING:
        credit = CREDITS.get(name)
        for rewards, signal in (([0.5, 0.5 + 5e-7], False), ([0.5, 0.5 + 1e-5], True), ([1.0, 1.0], False)):
            group = group_of(*([reward] for reward in rewards))
            assert has_signal(group, assign(credit, group, {}), credit) is signal


def test_equal_rewards_that_came_at_different_turns_have_signal_under_turn_credit_only() -> None:
    group = group_of([1.0, 0.0], [0.0, 1.0])
    for name in COMPARING:
        credit = CREDITS.get(name)
        signal = has_signal(group, assign(credit, group, {}), credit)
        assert signal is (name in ("turn_returns", "step_rewards", "gigpo")), name


def test_equal_rewards_in_unequal_portions_have_signal_under_turn_credit_only() -> None:
    group = group_of([0.5, 0.5], [1.0])  # each trajectory's turns are alike, but a turn of the second is worth more
    for name, options in (("step_rewards", {}), ("turn_returns", {"gamma": 0.0}), ("grpo", {}), ("rloo", {})):
        credit = CREDITS.get(name)
        advantages = assign(credit, group, options)
        assert has_signal(group, advantages, credit, options) is bool(advantages[1][0] > 0.5), name

    def without_epsilon(group: GroupRewards) -> list[np.ndarray]:
        return group.over_steps((group.rewards - group.rewards.mean()) / group.rewards.std())

    rounded = group_of([0.1, 0.2], [0.3])  # 0.1 + 0.2 is 0.30000000000000004
    advantages = assign(without_epsilon, rounded, {})
    assert abs(advantages[1][0]) > 1
    assert not has_signal(rounded, advantages, without_epsilon, {})


def test_unequal_rewards_without_an_advantage_have_no_signal() -> None:
    for name, options, rewards in (
        ("maxrl", {}, [[-1.0], [-1.0], [0.0], [1.0]]),  # the mean is negative
        ("step_rewards", {"normalise": "turn"}, [[0.0, 1.0], [0.0]]),  # only one reached the turn that differs
    ):
        credit, group = CREDITS.get(name), group_of(*rewards)
        advantages = assign(credit, group, options)
        assert not np.concatenate(advantages).any()
        assert not has_signal(group, advantages, credit, options), name


@pytest.mark.parametrize("name", STEPWISE)
def test_empty_batches_groups_and_trajectories(name: str) -> None:
    credit = CREDITS.get(name)
    assert assign_all(credit, [], {}) == []
    nothing = GroupRewards(np.zeros(0), [], [])
    without_steps = group_of([], [])
    found = assign_all(credit, [nothing, without_steps, group_of([], [1.0])], {})
    assert found[0] == []
    assert [a.tolist() for a in found[1]] == [[], []]
    assert [len(a) for a in found[2]] == [0, 1]
    assert not has_signal(nothing, found[0], credit)


def test_one_turn_beside_thirty_weighs_as_much_in_every_baseline() -> None:
    """A long trajectory pulls no mean towards itself: what its turns get sums to what the short one gets, by turn."""
    groups = [group_of([1.0], [0.0] * 30), group_of([0.0] * 29 + [1.0], [0.0])]
    # gigpo's step part counts occurrences of a state by design, and step rewards see the last turn alone
    for name in sorted(set(STEPWISE) - {"gigpo", "step_rewards"}):
        for (short, long), (long_won, short_lost) in [assign_all(CREDITS.get(name), groups, {})]:
            assert long == pytest.approx([-short[0]] * 30), name
            assert long_won == pytest.approx([short[0]] * 30), name
            assert short_lost == pytest.approx(-short), name


def test_what_an_estimator_may_not_return_is_named() -> None:
    def short(group: GroupRewards) -> list[np.ndarray]:
        return [np.zeros(0) for _ in group.rewards]

    def broken(group: GroupRewards) -> list[np.ndarray]:
        return [np.full(len(steps), np.nan) for steps in group.step_rewards]

    @over_batch
    def first_only(groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        return [[np.zeros(len(steps)) for steps in groups[0].step_rewards]]

    group = group_of([0.0], [1.0])
    with pytest.raises(ValueError, match="credit short returned advantages of shapes"):
        assign(short, group, {})
    with pytest.raises(ValueError, match="credit broken returned an advantage that is not finite"):
        assign(broken, group, {})
    with pytest.raises(ValueError, match="credit first_only returned the advantages of 1 groups for 2"):
        assign_all(first_only, [group, group], {})
    with pytest.raises(ValueError, match="credit gae gives each token its own advantage"):
        assign(CREDITS.get("gae"), group, {})


def test_user_code_adds_estimators_with_a_decorator() -> None:
    registry = CreditRegistry("credit", {"grpo": "stepgym.credit.grpo:grpo"})

    @registry.register("raw")
    @group_baseline(False)
    def raw(group: GroupRewards, *, scale: float = 1.0) -> list[np.ndarray]:
        return group.over_steps(group.rewards * scale)

    @registry.register("best")
    @over_batch
    def best(groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        highest = max(group.rewards.max() for group in groups)
        return [group.over_steps((group.rewards == highest).astype(float)) for group in groups]

    groups = [group_of([1.0]), group_of([2.0, 1.0], [0.0])]
    assert [[a.tolist() for a in g] for g in assign_all(registry.get("raw"), groups, {"scale": 2.0})] == [
        [[2.0]], [[6.0, 6.0], [0.0]],
    ]  # fmt: skip
    assert [[a.tolist() for a in g] for g in assign_all(registry.get("best"), groups, {})] == [
        [[0.0]], [[1.0, 1.0], [0.0]],
    ]  # fmt: skip
    assert registry.names() == ["best", "grpo", "raw"]
    assert level(over_tokens(lambda batch: None)) == "token"


def test_group_rewards_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 rewards for 1 lists"):
        GroupRewards(np.zeros(2), [np.zeros(1)])
    with pytest.raises(ValueError, match="not as many as the step rewards"):
        GroupRewards(np.zeros(1), [np.zeros(2)], [[Step(prompt_ids=[1], response_ids=[2])]])
