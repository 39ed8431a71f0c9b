"""Means over the tokens of all ranks, whatever part of them each rank had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgym.train.metrics import TokenMetrics
from stepgym.train.parallel.processes import Processes

NAN = float("nan")
PARTS: list[list[dict[str, list[float]]]] = [  # per rank, per micro-batch
    [{"ratio": [1.0, 2.0], "entropy": [0.5, 0.5], "sampler": [-1.0, NAN]}, {"ratio": [0.5], "sampler": [-3.0]}],
    [{"ratio": [4.0, 1.0, 1.0], "entropy": [2.0, 1.0, 0.0], "sampler": [NAN, NAN, NAN]}],
    [],
]


def measured(rank: int) -> TokenMetrics:
    metrics = TokenMetrics()
    for part in PARTS[rank]:
        metrics.add({name: torch.tensor(part[name]) for name in ("ratio", "entropy") if name in part})
        metrics.add_gap(torch.full((len(part["sampler"]),), -2.0), torch.tensor(part["sampler"]))
        metrics.add_loss(torch.tensor(0.25))
        metrics.count(len(part["ratio"]))
    metrics.close()
    return metrics


def gather(processes: Processes) -> dict[str, float]:
    return measured(processes.rank).means(processes)


EXPECTED = {
    "ratio": 9.5 / 6,
    "ratio_max": 4.0,
    "entropy": 4.0 / 6,
    "loss": 0.75,
    "logprob_gap_mean": 1.0,
    "logprob_gap_max": 1.0,
}


def test_every_rank_gets_the_means_over_all_tokens(ranks: Callable[..., list[Any]]) -> None:
    answers = ranks(gather, size=3)
    assert answers[0] == answers[1] == answers[2] == pytest.approx(EXPECTED)


def test_they_are_those_of_one_process_with_all_tokens() -> None:
    whole = TokenMetrics()
    for rank in range(3):
        whole.merge(measured(rank))
    assert whole.means() == pytest.approx({**EXPECTED, "loss": 0.25})  # three updates of a process, not one of three


def test_one_process_gathers_nothing() -> None:
    assert measured(0).means(Processes.start("cpu", {})) == measured(0).means()
