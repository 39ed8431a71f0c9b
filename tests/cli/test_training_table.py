"""The table at the end of a training run says what the summary says."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from stepgym.cli.training_table import training_table
from stepgym.train.alarms import Alarm
from stepgym.train.result import TrainingResult

RESULT = TrainingResult(
    success_before=0.4,
    success_after=0.9514,
    greedy_before=None,
    greedy_after=None,
    held_out_tasks=256,
    updates=29,
    iterations=30,
    outcomes={"completed": 3700, "turn_limit": 140},
    best_iteration=20,
    seed=3,
    wall_s=1184.4,
    seconds={},
    model="model",
    totals={
        "tokens_steps": 1_725_870,
        "tokens_unique": 560_000,
        "tokens_forward": 575_290,
        "seconds/rollout": 27.9,
        "seconds/update": 45.2,
        "seconds/sync": 0.1,
        "memory_rss_gib": 1.26,
    },
    alarms=[Alarm("no_signal", 12, 1.0, None, "no_signal: 100% of groups have equal rewards.")],
)


def shown(result: TrainingResult) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=200).print(training_table(result))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]


def test_every_measure_has_a_row() -> None:
    assert shown(RESULT) == [
        ["success, sampled", "0.400 -> 0.951", "of 256 held-out tasks"],
        ["updates", "29", "in the first 20 of 30 iterations; seed 3"],
        ["episodes in training", "3840", "completed 3700, turn_limit 140"],
        ["tokens learned from", "1.7M", "560.0k unique, 575.3k computed: 3.0 for one"],
        ["wall time", "1,184 s", "in iterations: update 45 s, rollout 28 s"],
        ["peak memory", "1.3 GiB", "resident"],
        ["alarm", "iteration 12", "no_signal: 100% of groups have equal rewards."],
    ]


def test_what_was_not_measured_has_none() -> None:
    bare = replace(RESULT, success_before=None, totals={}, alarms=[], outcomes={}, iterations=0, updates=0)
    assert [row[0] for row in shown(bare)] == ["updates", "episodes in training", "wall time"]
    greedy = replace(RESULT, greedy_before=0.0, greedy_after=1.0)
    assert shown(greedy)[1] == ["success, greedy", "0.000 -> 1.000", "of 256 held-out tasks"]
    gpu = replace(RESULT, totals={**RESULT.totals, "memory_cuda_gib": 61.04})
    assert ["updates", "29", "in 30 iterations; seed 3"] in shown(replace(RESULT, best_iteration=30))
    assert ["peak memory", "1.3 GiB", "resident; on the GPU 61.0 GiB"] in shown(gpu)
