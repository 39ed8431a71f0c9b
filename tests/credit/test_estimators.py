from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.config import validate_kwargs
from stepgym.credit import CREDITS
from stepgym.credit.group import GroupRewards, assign, has_signal
from stepgym.errors import UserError

OUTCOME_CREDITS = ("grpo", "rloo", "maxrl")


def group_of(rewards: list[float], turns: list[int] | None = None) -> GroupRewards:
    """A group whose rewards all come at the end."""
    turns = turns or [1] * len(rewards)
    steps = [np.array([0.0] * (n - 1) + [r]) for n, r in zip(turns, rewards, strict=True)]
    return GroupRewards(np.array(rewards, dtype=np.float64), steps)


def test_grpo_by_hand() -> None:
    # mean 0.25; deviations 0.75, -0.25 (three times); sum of squares 0.75; ddof=1 variance 0.25, standard deviation 0.5
    advantages = assign(CREDITS.get("grpo"), group_of([1, 0, 0, 0], [2, 1, 3, 1]), {})
    assert advantages[0] == pytest.approx([0.75 / 0.500001] * 2)
    assert advantages[2] == pytest.approx([-0.25 / 0.500001] * 3)


def test_grpo_without_std_is_the_centred_reward() -> None:
    advantages = assign(CREDITS.get("grpo"), group_of([1, 0, 0, 0]), {"scale_by_std": False})
    assert [a.item() for a in advantages] == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rloo_by_hand() -> None:
    # 1 - mean(0, 2) = 0; 0 - mean(1, 2) = -1.5; 2 - mean(1, 0) = 1.5
    advantages = assign(CREDITS.get("rloo"), group_of([1, 0, 2]), {})
    assert [a.item() for a in advantages] == pytest.approx([0.0, -1.5, 1.5])


def test_maxrl_by_hand() -> None:
    advantages = assign(CREDITS.get("maxrl"), group_of([1, 0, 0, 1]), {})
    assert [a.item() for a in advantages] == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)


def test_maxrl_with_a_mean_of_zero_or_less_is_zero() -> None:
    assert [a.item() for a in CREDITS.get("maxrl")(group_of([-1, -1, 0, 1]))] == [0, 0, 0, 0]
    assert [a.item() for a in CREDITS.get("maxrl")(group_of([-1, 0, 1]))] == [0, 0, 0]


@pytest.mark.parametrize("name", [*OUTCOME_CREDITS, "turn_returns"])
def test_a_group_of_one_gets_zero_on_every_step(name: str) -> None:
    group = group_of([5.0], [3])
    advantages = assign(CREDITS.get(name), group, {})
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert not has_signal(group, advantages)


def test_turn_returns_by_hand() -> None:
    # Returns with gamma 0.5: [1 + 0.5 * 2, 2] = [2, 2] and [0, 0.0]; values 2 and 0, mean 1.
    group = GroupRewards(np.array([3.0, 0.0]), [np.array([1.0, 2.0]), np.array([0.0, 0.0])])
    advantages = CREDITS.get("turn_returns")(group, gamma=0.5, scale_by_std=False)
    assert [a.tolist() for a in advantages] == [[1.0, 1.0], [-1.0, -1.0]]
    # gamma 1: returns [3, 2] and [0, 0]; values 2.5 and 0. Leave one out: baselines 0 and 2.5.
    advantages = CREDITS.get("turn_returns")(group, baseline="leave_one_out", scale_by_std=False)
    assert [a.tolist() for a in advantages] == [[3.0, 2.0], [-2.5, -2.5]]
    # Standard deviation: mean 1.25; (1.75^2 + 0.75^2) / 2 + 1.25^2 = 3.375, over n - 1 = 1.
    advantages = CREDITS.get("turn_returns")(group)
    assert advantages[0] == pytest.approx(np.array([1.75, 0.75]) / (np.sqrt(3.375) + 1e-6))


def test_turn_returns_count_a_trajectory_without_turns_by_its_reward() -> None:
    group = GroupRewards(np.array([1.0, 0.0]), [np.array([1.0]), np.array([])])
    advantages = CREDITS.get("turn_returns")(group, scale_by_std=False)
    assert [a.tolist() for a in advantages] == [[0.5], []]


@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=8),
    st.data(),
)
def test_outcome_advantages_do_not_depend_on_the_number_of_turns(rewards: list[float], data: st.DataObject) -> None:
    turns = data.draw(st.lists(st.integers(1, 30), min_size=len(rewards), max_size=len(rewards)))
    for name in OUTCOME_CREDITS:
        long = assign(CREDITS.get(name), group_of(rewards, turns), {})
        short = assign(CREDITS.get(name), group_of(rewards), {})
        for one, other, length in zip(long, short, turns, strict=True):
            assert one.tolist() == [other.item()] * length


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=10))
def test_centred_estimators_sum_to_zero(rewards: list[float]) -> None:
    for name in ("grpo", "rloo"):
        advantages = assign(CREDITS.get(name), group_of(rewards), {})
        assert abs(sum(a.item() for a in advantages)) < 1e-8 * max(1.0, max(abs(a.item()) for a in advantages))


def test_rewards_within_the_tolerance_have_no_signal() -> None:
    grpo = CREDITS.get("grpo")
    for rewards, signal in (([0.5, 0.5 + 5e-7], False), ([0.5, 0.5 + 1e-5], True), ([1.0, 1.0], False)):
        group = group_of(rewards)
        assert has_signal(group, assign(grpo, group, {})) is signal


def test_equal_rewards_that_came_at_different_turns_have_signal_under_turn_credit_only() -> None:
    group = GroupRewards(np.array([1.0, 1.0]), [np.array([1.0, 0.0]), np.array([0.0, 1.0])])
    assert has_signal(group, CREDITS.get("turn_returns")(group))
    assert not has_signal(group, CREDITS.get("grpo")(group))


@pytest.mark.parametrize("name", ["gae", "GAE", "td-lambda", "TD(lambda)", "reinforce++", "vtrace"])
def test_temporal_estimators_are_refused_and_the_alternatives_named(name: str) -> None:
    with pytest.raises(UserError, match=r"does not fit step-wise data: .* Use grpo, maxrl, rloo or turn_returns"):
        CREDITS.get(name)


def test_an_unknown_estimator_and_an_unknown_option_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"unknown credit 'gropo'; did you mean 'grpo'\?"):
        CREDITS.get("gropo")
    with pytest.raises(UserError, match=r"unknown field 'gama'; did you mean 'gamma'\?"):
        validate_kwargs(CREDITS.get("turn_returns"), {"gama": 0.9}, "credit")
    with pytest.raises(UserError, match=r"credit\.gamma"):
        validate_kwargs(CREDITS.get("turn_returns"), {"gamma": 1.5}, "credit")


def test_an_estimator_that_returns_the_wrong_shape_or_nan_is_named() -> None:
    def short(group: GroupRewards) -> list[np.ndarray]:
        return [np.zeros(0) for _ in group.rewards]

    def broken(group: GroupRewards) -> list[np.ndarray]:
        return [np.full(len(steps), np.nan) for steps in group.step_rewards]

    with pytest.raises(ValueError, match="credit short returned advantages of shapes"):
        assign(short, group_of([0, 1]), {})
    with pytest.raises(ValueError, match="not finite"):
        assign(broken, group_of([0, 1]), {})


def test_user_code_adds_an_estimator_with_a_decorator() -> None:
    from stepgym.credit.refused import CreditRegistry

    registry = CreditRegistry("credit", {"grpo": "stepgym.credit.grpo:grpo"})

    @registry.register("raw")
    def raw(group: GroupRewards, *, scale: float = 1.0) -> list[np.ndarray]:
        return group.over_steps(group.rewards * scale)

    assert [a.item() for a in assign(registry.get("raw"), group_of([1, 2]), {"scale": 2.0})] == [2.0, 4.0]


def test_credit_needs_no_torch() -> None:
    code = "import stepgym.credit.treatment, stepgym.credit as c, sys; [c.CREDITS.get(n) for n in c.CREDITS]; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
