"""Sinks and alarms in a real run that is cut off and goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from coin import RECIPE

from stepgym.errors import UserError
from stepgym.run.folder import RunFolder, run_folder
from stepgym.train.loop import check_training, train
from stepgym.train.observer import Observer
from stepgym.train.recipe import Recipe, check_recipe
from stepgym.train.sinks.base import RunInfo, Sink

told: list[Any] = []


class Told(Sink):
    """Remembers what it is told."""

    def open(self, run: RunInfo) -> None:
        told.append(("open", run.name, run.after, run.config["seed"]))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        told.append((step, metrics["reward_mean"], "tokens_unique" in metrics))

    def close(self, summary: Mapping[str, float] | None) -> None:
        told.append(("close", None if summary is None else summary["updates"]))


class Missing(Sink):
    """Needs what nobody has."""

    requires = "no_such_package"


class Ends(Observer):
    """Ends the run after an iteration."""

    def __init__(self, after: int) -> None:
        self._after = after

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        if number == self._after:
            raise KeyboardInterrupt


def plan(sink: str | None, **metrics: Any) -> Recipe:
    sinks = [] if sink is None else [f"{__name__}:{sink}"]
    budget = {"iterations": 3, "tasks_per_iteration": 4}
    recipe = {**RECIPE, "budget": budget, "evaluation": {"test_tasks": 0}, "checkpoint": {"every": 2}}
    return check_recipe({**recipe, "metrics": {"sinks": sinks, **metrics}}, Path("recipe.yaml"))


def test_a_run_that_goes_on_tells_a_sink_each_iteration_once(tmp_path: Path) -> None:
    told.clear()

    def go(recipe: Recipe, observer: Observer) -> RunFolder:
        config = recipe.model_dump(mode="json")
        with run_folder(tmp_path / "coin" / "run", config=config, digest=recipe.digest) as folder:
            train(recipe, folder, observer)
            return folder

    with pytest.raises(KeyboardInterrupt):
        go(plan("Told"), Ends(after=3))
    # Other alarms: where metrics go, and which alarms are raised, is no part of what identifies the run.
    folder = go(plan("Told", alarms={"levels": {"turns_fall": 100.0}}), Observer())
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows if row["iteration"]]
    assert told[0] == ("open", "coin/run", None, 0)
    assert told[1:3] == [(1, rewards[0], True), (2, rewards[1], True)]
    cut = told.index(("close", None))
    assert told[cut + 1] == ("open", "coin/run", 2, 0)
    assert [entry[:2] for entry in told if isinstance(entry[0], int)] == [
        (number, reward) for number, reward in enumerate(rewards, start=1)
    ]
    summary = folder.summary()
    assert summary is not None
    assert told[-1] == ("close", summary["updates"])
    assert [(alarm["name"], alarm["iteration"]) for alarm in summary["alarms"]] == [("turns_fall", 2)]


def test_a_missing_package_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_package"):
        check_training(plan("Missing"))
