"""What a run came to, from the rows of its metrics."""

from __future__ import annotations

import json

from stepgym.train.alarms import Alarm
from stepgym.train.result import TrainingResult, count_outcomes, run_totals

ROWS = [
    {"iteration": 0, "warm_start": {"loss": 1.0, "tokens": 99}},
    {
        "iteration": 1,
        "episodes": 8.0,
        "episode_tokens_mean": 12.5,
        "outcome/completed": 6.0,
        "outcome/turn_limit": 2.0,
        "tokens_trained": 90,
        "tokens_steps": 1000,
        "tokens_unique": 300,
        "tokens_forward": 310,
        "seconds/rollout": 2.0,
        "memory_rss_gib": 1.5,
    },
    {
        "iteration": 2,
        "episodes": 8.0,
        "episode_tokens_mean": 10.0,
        "outcome/turn_limit": 7.0,
        "outcome/completed": 1.0,
        "tokens_trained": 70,
        "tokens_steps": 900,
        "tokens_unique": 200,
        "tokens_forward": 200,
        "seconds/rollout": 1.0,
        "seconds/update": 4.0,
        "memory_rss_gib": 1.25,
    },
]


def test_sums_and_peaks_by_hand() -> None:
    assert run_totals(ROWS) == {
        "episodes": 16,
        "tokens_sampled": 180,
        "tokens_trained": 160,
        "tokens_steps": 1900,
        "tokens_unique": 500,
        "tokens_forward": 510,
        "seconds/rollout": 3.0,
        "seconds/update": 4.0,
        "memory_rss_gib": 1.5,
    }
    assert list(count_outcomes(ROWS).items()) == [("turn_limit", 9), ("completed", 7)]
    assert (run_totals([]), count_outcomes([])) == ({}, {})


def test_it_goes_to_json() -> None:
    result = TrainingResult(
        success_before=0.1,
        success_after=0.9,
        greedy_before=None,
        greedy_after=None,
        held_out_tasks=4,
        updates=2,
        iterations=2,
        outcomes=count_outcomes(ROWS),
        best_iteration=2,
        seed=0,
        wall_s=10.0,
        seconds={},
        model="model",
        totals=run_totals(ROWS),
        alarms=[Alarm("no_signal", 3, 1.0, None, "no_signal: 100% of groups have equal rewards")],
    )
    summary = json.loads(json.dumps(result.to_dict()))
    assert summary["alarms"][0]["iteration"] == 3
    assert (summary["totals"]["tokens_unique"], summary["success_after"]) == (500, 0.9)
