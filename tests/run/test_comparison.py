from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from stepgym.errors import UserError
from stepgym.record.outcome import Outcome
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.comparison import compare
from stepgym.run.statistics import Evaluation, summarize


def evaluation(rewards: Mapping[str, Sequence[float]], *, env_id: str = "sql", answer: str = "") -> Evaluation:
    return summarize(
        Trajectory(
            id=TrajectoryId("eval", 0, task, sample),
            outcome=Outcome.COMPLETED,
            reward=reward,
            success=reward >= 1,
            env_id=env_id,
            task={"id": task, "answer": answer or task},
        )
        for task, samples in rewards.items()
        for sample, reward in enumerate(samples)
    )


def numbered(rewards: Sequence[float]) -> dict[str, list[float]]:
    return {str(i): [reward] for i, reward in enumerate(rewards)}


def test_a_difference_on_every_one_of_six_tasks_is_larger_than_chance_and_on_five_is_not() -> None:
    six = compare(evaluation(numbered([0] * 6)), evaluation(numbered([1] * 6)))
    assert (six.success.difference, six.success.p_value) == (1.0, 2 / 64)
    assert six.success.verdict == "larger than chance"
    assert (
        six.verdict == "B solves 100.0 points more than A on the 6 tasks that both have: larger than chance (p = 0.031)"
    )
    five = compare(evaluation(numbered([1] * 5)), evaluation(numbered([0] * 5)))
    assert (five.success.difference, five.success.p_value) == (-1.0, 2 / 32)
    assert five.verdict.startswith("A solves 100.0 points more than B on the 5 tasks")
    assert five.success.verdict == "not larger than chance"


def test_pairing_finds_what_unpaired_intervals_hide() -> None:
    """Hard and easy tasks differ far more than the two agents do; the pairs differ always the same way."""
    a = {str(i): [1.0] * (i % 8) + [0.0] * (8 - i % 8) for i in range(40)}
    b = {str(i): [1.0] * (i % 8 + 1) + [0.0] * (7 - i % 8) for i in range(40)}
    left, right = evaluation(a), evaluation(b)
    assert left.success_ci95 is not None
    assert right.success_ci95 is not None
    assert left.success_ci95[1] > right.success_ci95[0]
    result = compare(left, right)
    assert result.success.difference == pytest.approx(0.125)
    assert result.success.ci95 == pytest.approx((0.125, 0.125))
    assert result.success.larger_than_chance


def test_an_evaluation_is_no_better_than_itself() -> None:
    one = evaluation(numbered([0, 1, 1, 0, 1]))
    result = compare(one, one)
    assert (result.success.difference, result.success.p_value) == (0.0, 1.0)
    assert result.verdict == "A and B solve the same share of the 5 tasks that both have"


def test_swapping_the_sides_changes_the_sign_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    a, b = (evaluation(numbered(rng.integers(0, 2, 40))) for _ in range(2))
    forth, back = compare(a, b), compare(b, a)
    assert forth.success.difference == pytest.approx(-back.success.difference)
    assert forth.success.p_value == pytest.approx(back.success.p_value, abs=0.03)


def test_tasks_that_only_one_side_has_are_left_out_and_counted() -> None:
    result = compare(evaluation({"a": [0], "b": [1], "c": [0]}), evaluation({"b": [1], "c": [1], "d": [1], "e": [1]}))
    assert (result.tasks, result.only_a, result.only_b, result.changed) == (2, 1, 2, 0)
    assert (result.success.a, result.success.b) == (0.5, 1.0)


def test_rewards_are_compared_as_well() -> None:
    result = compare(evaluation({"a": [0.2, 0.4], "b": [0.0]}), evaluation({"a": [0.5], "b": [0.6]}))
    assert result.reward.difference == pytest.approx(0.4)
    assert (result.success.difference, result.success.ci95) == (0.0, (0.0, 0.0))
    table = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert table["reward"]["verdict"] == "not larger than chance"
    assert table["reward"]["ci95"] == pytest.approx(result.reward.ci95)


def test_comparing_what_cannot_be_compared_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="A is of the environment 'sql', B of 'search'"):
        compare(evaluation({"a": [1]}), evaluation({"a": [1]}, env_id="search"))
    with pytest.raises(UserError, match="no task in common"):
        compare(evaluation({"a": [1]}), evaluation({"b": [1]}))
    with pytest.raises(UserError, match="the ids they share name different tasks"):
        compare(evaluation({"0": [1]}, answer="x"), evaluation({"0": [1]}, answer="y"))


def test_a_comparison_with_an_incomplete_side_says_so() -> None:
    whole = evaluation(numbered([1, 0]))
    partial = summarize(
        [Trajectory(id=TrajectoryId("eval", 0, "0", 0), outcome=Outcome.COMPLETED, reward=1.0, task={"answer": "0"})],
        expected=2,
    )
    assert compare(whole, partial).incomplete
    assert not compare(whole, whole).incomplete
