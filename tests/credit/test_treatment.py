from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory, TrajectoryId


def trajectory(
    sample: int,
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    *,
    task: str = "a",
    attempt: int = 0,
    final: bool = True,
    step_rewards: tuple[float, ...] = (0.0, 1.0),
) -> Trajectory:
    steps = [Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0], reward=r) for r in step_rewards]
    return Trajectory(
        id=TrajectoryId("train", 0, task, sample, attempt),
        outcome=outcome,
        final=final,
        steps=steps,
        reward=reward,
        reward_range=(-1.0, 1.0),
    )


def test_groups_and_members_are_in_order_whatever_finished_first() -> None:
    made = [trajectory(1, task="b"), trajectory(1), trajectory(0, task="b"), trajectory(0)]
    for order in (made, made[::-1]):
        groups, _ = treat(order, OutcomePolicy())
        assert [group.key[2] for group in groups] == ["a", "b"]
        assert [[m.trajectory.id.sample for m in group.members] for group in groups] == [[0, 1], [0, 1]]


def test_each_outcome_is_treated_and_counted_as_the_table_says() -> None:
    made = [trajectory(i, 0.5, outcome) for i, outcome in enumerate(Outcome)]
    groups, counts = treat(made, OutcomePolicy())
    kept = {"completed": 0.5, "turn_limit": 0.5, "malformed_action": -1.0, "response_truncated": 0.5}
    assert {str(m.trajectory.outcome): m.reward for m in groups[0].members} == kept
    assert counts.to_dict()["kept"] == dict.fromkeys(kept, 1)
    assert counts.to_dict()["masked"] == {"context_overflow": 1, "episode_timeout": 1}
    assert set(counts.to_dict()["dropped"]) == {
        "agent_error", "env_error", "env_timeout", "engine_error", "engine_timeout", "cancelled",
    }  # fmt: skip


def test_a_config_changes_the_treatment() -> None:
    policy = OutcomePolicy.from_config({"episode_timeout": {"train": True, "reward": -0.25}})
    groups, counts = treat([trajectory(0, None, Outcome.EPISODE_TIMEOUT)], policy)
    assert groups[0].members[0].reward == -0.25
    assert counts.kept == {Outcome.EPISODE_TIMEOUT: 1}


def test_attempts_that_are_not_final_are_never_counted() -> None:
    made = [trajectory(0, None, Outcome.ENV_ERROR, final=False), trajectory(0, attempt=1)]
    groups, counts = treat(made, OutcomePolicy())
    assert len(groups[0].members) == 1
    assert counts.to_dict() == {"kept": {"completed": 1}, "masked": {}, "dropped": {}}


def test_two_final_attempts_of_one_sample_are_refused() -> None:
    with pytest.raises(UserError, match=r"train/0/a/0/1: another attempt of this sample is final too"):
        treat([trajectory(0), trajectory(0, attempt=1)], OutcomePolicy())


def test_a_trajectory_without_a_reward_is_dropped_not_zero() -> None:
    groups, counts = treat([trajectory(0, None), trajectory(1, 0.0)], OutcomePolicy())
    assert [m.trajectory.id.sample for m in groups[0].members] == [1]
    assert counts.dropped == {Outcome.COMPLETED: 1}


def test_a_group_without_members_is_no_group() -> None:
    groups, counts = treat([trajectory(0, None, Outcome.ENGINE_ERROR)], OutcomePolicy())
    assert groups == []
    assert counts.dropped == {Outcome.ENGINE_ERROR: 1}


def test_step_rewards_sum_to_the_reward_after_treatment() -> None:
    made = [
        trajectory(0, 1.5, step_rewards=(0.25, 0.25, 1.0)),
        trajectory(1, 0.5, Outcome.MALFORMED_ACTION, step_rewards=(0.5, 0.0)),
        trajectory(2, 1.0, step_rewards=()),
    ]
    groups, _ = treat(made, OutcomePolicy())
    steps = [member.step_rewards for member in groups[0].members]
    assert steps[0].tolist() == [0.25, 0.25, 1.0]
    assert steps[1].tolist() == [0.5, -1.5]
    assert steps[2].tolist() == []
    assert groups[0].rewards.rewards.tolist() == [1.5, -1.0, 1.0]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(UserError, match="not finite"):
        treat([replace(trajectory(0), reward=float(np.nan))], OutcomePolicy())
