from __future__ import annotations

from dataclasses import replace

import pytest

from stepgym.record.digest import content_digest
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId

STEP = Step(
    prompt_ids=[1, 2],
    response_ids=[3],
    logprobs=[-1.0],
    reward=1.0,
    message={"role": "assistant", "content": "x"},
    sampling=Sampling(),
    metrics={"latency_s": 0.5, "tokens": 3},
)
TRAJECTORY = Trajectory(
    id=TrajectoryId("train", 0, "t", 0),
    outcome=Outcome.COMPLETED,
    steps=[STEP],
    reward=1.0,
    task={"a": 1, "b": 2},
    metrics={"wall_s": 3.0, "tokens_per_s": 9.0, "turns": 1},
    started_at=1.0,
    error="at 0x7f",
)


def test_order_and_times_do_not_count():
    other = replace(TRAJECTORY, id=TrajectoryId("train", 0, "t", 1))
    assert content_digest([TRAJECTORY, other]) == content_digest(iter([other, TRAJECTORY]))
    later = replace(
        TRAJECTORY,
        started_at=2.0,
        error="at 0x80",
        metrics={"wall_s": 4.0, "turns": 1},
        task={"b": 2, "a": 1},
        steps=[replace(STEP, metrics={"latency_s": 0.7, "tokens": 3})],
    )
    assert content_digest([later]) == content_digest([TRAJECTORY])


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": [1, 9]},
        {"response_ids": [9]},
        {"logprobs": [-1.0000001]},
        {"logprobs": None},
        {"loss_mask": [0]},
        {"reward": 0.5},
        {"status": "malformed"},
        {"rendering": "first"},
        {"finish_reason": "length"},
        {"message": {"role": "assistant", "content": "y"}},
        {"new_messages": [{"role": "user"}]},
        {"sampling": Sampling(temperature=0.5)},
        {"weights_versions": [("1", 0, 1)]},
        {"metrics": {"tokens": 4}},
        {"sampler": "scripted"},
        {"routed_experts": [[[0]], [[0]], [[0]]]},
    ],
)
def test_everything_in_a_step_counts(change):
    changed = replace(TRAJECTORY, steps=[replace(STEP, **change)])
    assert content_digest([changed]) != content_digest([TRAJECTORY])


@pytest.mark.parametrize(
    "change",
    [
        {"id": TrajectoryId("train", 0, "t", 0, 1)},
        {"outcome": Outcome.TURN_LIMIT},
        {"outcome_detail": "x"},
        {"final": False},
        {"steps": []},
        {"steps": [STEP, STEP]},
        {"reward": None},
        {"reward": 0.0},
        {"success": True},
        {"reward_parts": {"format": 1.0}},
        {"task": {"a": 1}},
        {"tools": [{}]},
        {"env_id": "x"},
        {"env_config": {"x": 1}},
        {"reward_range": (0.0, 2.0)},
        {"seeds": {"env": 1}},
        {"metrics": {"turns": 2}},
        {"provenance": {"model": "x"}},
    ],
)
def test_everything_in_a_trajectory_counts(change):
    assert content_digest([replace(TRAJECTORY, **change)]) != content_digest([TRAJECTORY])


def test_ids_do_not_run_from_prompt_into_response():
    left = replace(TRAJECTORY, steps=[Step(prompt_ids=[1, 2], response_ids=[3])])
    right = replace(TRAJECTORY, steps=[Step(prompt_ids=[1], response_ids=[2, 3])])
    assert content_digest([left]) != content_digest([right])
    assert content_digest([]) != content_digest([TRAJECTORY])
