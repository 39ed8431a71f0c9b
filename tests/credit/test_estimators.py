"""Outcome estimators over one group, and the registry that all estimators are in."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.config import validate_kwargs
from stepgym.credit import CREDITS
from stepgym.credit.group import GroupRewards, assign
from stepgym.errors import UserError

OUTCOME_CREDITS = ("grpo", "dr_grpo", "rloo", "maxrl")


def group_of(rewards: list[float], turns: list[int] | None = None) -> GroupRewards:
    """A group whose rewards all come at the end."""
    turns = turns or [1] * len(rewards)
    steps = [np.array([0.0] * (n - 1) + [r]) for n, r in zip(turns, rewards, strict=True)]
    return GroupRewards(np.array(rewards, dtype=np.float64), steps)


def test_grpo_by_hand() -> None:
    # mean 0.25; deviations 0.75, -0.25 (three times); sum of squares 0.75; ddof=1 variance 0.25, standard deviation 0.5
    advantages = assign(CREDITS.get("grpo"), group_of([1, 0, 0, 0], [2, 1, 30, 1]), {})
    assert advantages[0] == pytest.approx([0.75 / 0.500001] * 2)
    assert advantages[2] == pytest.approx([-0.25 / 0.500001] * 30)


def test_grpo_with_negative_rewards_by_hand() -> None:
    # mean -2; deviations 1, 0, -1; variance 2 / 2 = 1
    advantages = assign(CREDITS.get("grpo"), group_of([-1, -2, -3]), {})
    assert [a.item() for a in advantages] == pytest.approx([1 / 1.000001, 0.0, -1 / 1.000001])


@pytest.mark.parametrize(("credit", "options"), [("grpo", {"scale_by_std": False}), ("dr_grpo", {})])
def test_without_std_it_is_the_centred_reward(credit: str, options: dict[str, bool]) -> None:
    advantages = assign(CREDITS.get(credit), group_of([1, 0, 0, 0], [1, 30, 1, 1]), options)
    assert advantages[0].tolist() == [0.75]
    assert advantages[1].tolist() == [-0.25] * 30
    advantages = assign(CREDITS.get(credit), group_of([-3, -1]), options)
    assert [a.item() for a in advantages] == [-1.0, 1.0]


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


@pytest.mark.parametrize("name", OUTCOME_CREDITS)
def test_zero_variance_is_zero(name: str) -> None:
    for advantage in assign(CREDITS.get(name), group_of([0.5, 0.5, 0.5], [1, 2, 30]), {}):
        assert advantage.tolist() == [0.0] * len(advantage)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.data())
def test_outcome_advantages_do_not_depend_on_the_number_of_turns(rewards: list[float], data: st.DataObject) -> None:
    turns = data.draw(st.lists(st.integers(1, 30), min_size=len(rewards), max_size=len(rewards)))
    for name in OUTCOME_CREDITS:
        long = assign(CREDITS.get(name), group_of(rewards, turns), {})
        short = assign(CREDITS.get(name), group_of(rewards), {})
        for one, other, length in zip(long, short, turns, strict=True):
            assert one.tolist() == [other.item()] * length


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=10))
def test_centred_estimators_sum_to_zero(rewards: list[float]) -> None:
    for name in ("grpo", "dr_grpo", "rloo"):
        advantages = assign(CREDITS.get(name), group_of(rewards), {})
        assert abs(sum(a.item() for a in advantages)) < 1e-8 * max(1.0, max(abs(a.item()) for a in advantages))


# ---- the registry ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("td-lambda", "use gae with gae_lambda"),
        ("TD(lambda)", "use gae with gae_lambda"),
        ("n_step", "use gae with gae_lambda"),
        ("vtrace", "use gae, and `correction`"),
        ("V-trace", "use gae, and `correction`"),
    ],
)
def test_temporal_estimators_that_are_not_here_are_refused_with_the_way_out(name: str, instead: str) -> None:
    with pytest.raises(UserError, match=rf"does not fit step-wise data: .* {instead}"):
        CREDITS.get(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gropo", "grpo"),
        ("GAE", "gae"),
        ("ppo_critic", "gae"),
        ("REINFORCE++", "reinforce_plus_plus"),
        ("reinforce++-baseline", "reinforce_plus_plus_baseline"),
        ("Dr. GRPO", "dr_grpo"),
        ("GiGPO", "gigpo"),
    ],
)
def test_an_unknown_estimator_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(UserError) as refused:
        CREDITS.get(name)
    assert str(refused.value).startswith(f"unknown credit {name!r}; did you mean {meant!r}? Known: dr_grpo, gae, ")


def test_an_unknown_option_and_a_value_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match=r"unknown field 'gama'; did you mean 'gamma'\?"):
        validate_kwargs(CREDITS.get("turn_returns"), {"gama": 0.9}, "credit")
    for name in ("turn_returns", "gigpo", "gae", "reinforce", "reinforce_plus_plus"):
        with pytest.raises(UserError, match=r"credit\.gamma"):
            validate_kwargs(CREDITS.get(name), {"gamma": 1.5}, "credit")
    with pytest.raises(UserError, match=r"credit\.step_weight"):
        validate_kwargs(CREDITS.get("gigpo"), {"step_weight": -1}, "credit")


def test_credit_needs_no_torch() -> None:
    code = "import stepgym.credit.treatment, stepgym.credit as c, sys; [c.CREDITS.get(n) for n in c.CREDITS]; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_looking_at_the_registry_imports_no_estimator() -> None:
    code = "import stepgym.credit as c, sys; list(c.CREDITS); sys.exit('stepgym.credit.gigpo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
