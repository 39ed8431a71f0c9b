"""A run's folder, its metrics, and a sink in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepgym.run.folder import run_folder
from stepgym.train.metrics_log import MetricsLog
from stepgym.train.observer import Observer
from stepgym.train.sinks.config import MetricsConfig


class Notes(Observer):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.iterations: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        self.iterations.append(number)


@contextmanager
def open_log(
    path: Path, config: Mapping[str, Any], after: int | None = None, recipe: Mapping[str, Any] | None = None
) -> Iterator[tuple[MetricsLog, Notes]]:
    """The metrics log of a run in this folder, begun after an iteration."""
    notes = Notes()
    with run_folder(path, config={"seed": 0}, digest="digest") as folder:
        log = MetricsLog(MetricsConfig.model_validate(config), folder, notes, recipe)
        log.begin(after)
        yield log, notes


@pytest.fixture
def logged() -> Callable[..., Any]:
    return open_log


def row(iteration: int, **metrics: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "reward_mean": iteration / 10,
        "kl": float("nan"),
        "validation_success": None,
        **metrics,
    }


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    return row
