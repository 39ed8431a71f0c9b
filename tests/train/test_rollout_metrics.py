"""Numbers about the rollouts of an iteration, against values counted by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.rollout_metrics import rollout_metrics


def turn(prompt: int, response: int, logprob: float = -1.0, **fields: Any) -> Step:
    """A turn of so many prompt and response tokens, each sampled with this logprob."""
    return Step(
        prompt_ids=np.arange(prompt), response_ids=np.arange(response), logprobs=np.full(response, logprob), **fields
    )


def episode(sample: int, steps: list[Step], *, attempt: int = 0, **fields: Any) -> Trajectory:
    made: dict[str, Any] = {"outcome": Outcome.COMPLETED, "reward": 1.0, **fields}
    return Trajectory(id=TrajectoryId("train", 1, "task", sample, attempt), steps=steps, **made)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
WRONG_CALL = {"role": "assistant", "content": "", "invalid_tool_calls": [{"text": "{", "error": "not JSON"}]}
TOOLS = ({"type": "function"},)
EPISODES = [
    episode(0, [turn(10, 4, message=CALL), turn(20, 6)], tools=TOOLS, reward=1.0, reward_parts={"answer": 0.8}),
    episode(1, [turn(10, 2, message=WRONG_CALL)], tools=TOOLS, reward=0.0, reward_parts={"answer": 0.2, "form": 0.4}),
    episode(
        2,
        [turn(10, 8, -2.0, status="truncated", finish_reason="length"), turn(30, 0, status="malformed")],
        outcome=Outcome.TURN_LIMIT,
        reward=-0.5,
        attempt=1,
    ),
    episode(3, [], outcome=Outcome.ENV_ERROR, reward=None),
    episode(2, [turn(99, 99)], outcome=Outcome.ENGINE_ERROR, reward=None, final=False),
]


def test_every_number_is_what_counting_gives() -> None:
    assert rollout_metrics(EPISODES) == pytest.approx(
        {
            "episodes": 4,
            "outcome/completed": 2,
            "outcome/env_error": 1,
            "outcome/turn_limit": 1,
            "failed_rate": 1 / 4,
            "retried_rate": 1 / 4,
            "reward/completed": 0.5,
            "reward/turn_limit": -0.5,
            "reward_part/answer": 1.0 / 3,
            "reward_part/form": 0.4 / 3,
            "turns_mean": 5 / 4,
            "turns_max": 2,
            "episode_tokens_mean": 20 / 4,
            "episode_tokens_max": 10,
            "response_tokens_mean": 20 / 5,
            "response_tokens_max": 8,
            "prompt_tokens_mean": 80 / 5,
            "prompt_tokens_max": 30,
            "truncated_rate": 1 / 5,
            "malformed_rate": 1 / 5,
            "invalid_tool_call_rate": 1 / 5,
            "parse_failure_rate": 2 / 5,
            "no_action_rate": 0.0,
            "tool_call_rate": 1 / 3,
            "sampler_entropy": (12 * 1.0 + 8 * 2.0) / 20,
        }
    )


def test_what_there_is_nothing_to_take_a_mean_over_is_left_out() -> None:
    assert rollout_metrics([]) == {"episodes": 0.0}
    lost = rollout_metrics(EPISODES[3:])
    assert (lost["episodes"], lost["failed_rate"], lost["turns_mean"]) == (1.0, 1.0, 0.0)
    assert not {"response_tokens_mean", "reward/env_error", "sampler_entropy", "tool_call_rate"} & set(lost)


def test_turns_without_logprobs_leave_the_estimate_of_entropy_to_the_others(make: SimpleNamespace) -> None:
    silent = [replace(step, logprobs=None) for step in make.trajectory(turns=2).steps]
    found = rollout_metrics([episode(0, silent), episode(1, [turn(3, 2, -0.25)])])
    assert found["sampler_entropy"] == pytest.approx(0.25)
    assert "sampler_entropy" not in rollout_metrics([episode(0, silent)])
