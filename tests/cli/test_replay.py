"""`stepgym replay`: exit codes, the table, one line for each difference, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory


@pytest.fixture
def played(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> Path:
    """Three tasks, one sample each, played by the expert."""
    out = tmp_path / "run"
    done = stepgym("rollout", recipe, "--expert", "--tasks", 3, "rollout.samples=1", "--out", out)
    assert done.code == 0, done.err
    return out


def changed(run: Path, change: Callable[[Trajectory], Trajectory]) -> Path:
    with TrajectoryStore(run / "trajectories") as store, TrajectoryStore(run.parent / "changed", "a") as copy:
        for trajectory in store:
            copy.append(change(trajectory))
    return run.parent / "changed"


def test_a_run_answers_as_recorded(stepgym: Callable[..., Any], played: Path) -> None:
    done = stepgym("replay", played)
    assert done.code == 0, done.err
    assert "every replayed episode answered as recorded" in done.out
    done = stepgym("replay", played, "--json")
    said = json.loads(done.out)
    assert (said["played"], said["equal"], said["differences"], said["complete"]) == (3, 3, [], True)


def test_a_training_run_answers_as_recorded(stepgym: Callable[..., Any], trained: Path) -> None:
    """All its phases: the expert's, training, validation, test; played by a tiny model that makes mistakes."""
    said = json.loads(stepgym("replay", trained, "--json").out)
    with TrajectoryStore(trained / "trajectories") as store:
        assert said["played"] == said["equal"] == len(store) > 100
        turns = sum(len(trajectory.steps) for trajectory in store)
    assert said["turns"] == said["observations"] == turns
    train = json.loads(stepgym("replay", trained, "--phase", "train", "--limit", 5, "--json").out)
    assert (train["played"], train["complete"]) == (5, True)


def test_a_difference_is_one_line(stepgym: Callable[..., Any], played: Path) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        message = {"role": "user", "content": "purple\x1b[2J"}
        steps = [trajectory.steps[0], replace(trajectory.steps[1], new_messages=[message]), *trajectory.steps[2:]]
        return replace(trajectory, steps=steps) if trajectory.id.task_id == "train-1" else trajectory

    done = stepgym("replay", changed(played, plant))
    assert done.code == 1
    line = next(line for line in done.out.splitlines() if line.startswith("rollout/0/train-1/0/0"))
    assert line.startswith("rollout/0/train-1/0/0 turn 1 observation: content: [-purple\\e[2J-]{+")
    assert "\x1b" not in done.out
    assert stepgym("replay", played.parent / "changed", "--task", "train-0").code == 0


def test_what_could_not_be_replayed(stepgym: Callable[..., Any], played: Path) -> None:
    folder = changed(played, lambda t: replace(t, env_id="colors:Colours") if t.id.task_id == "train-2" else t)
    done = stepgym("replay", folder)
    assert done.code == 3
    assert "rollout/0/train-2/0/0 no environment:" in done.out
    assert "there is no module 'colors'" in done.out
    assert stepgym("replay", folder, "--env", "colours:Colours").code == 0
    assert stepgym("replay", folder, "--show", 0).out.count("train-2") == 0


def test_one_reason_for_many_is_said_once(stepgym: Callable[..., Any], played: Path) -> None:
    done = stepgym("replay", changed(played, lambda t: replace(t, env_id="colors:Colours")))
    assert done.code == 3
    assert done.out.count("there is no module 'colors'") == 1
    assert " more no environment: the environment cannot be made: environment 'colors:Colours'" in done.out


def test_attempts_that_failed_are_asked_for(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("rollout.samples=1", "env.break_tasks=1", "--split", "test", "--out", out)
    assert stepgym("rollout", recipe, "--expert", "--tasks", 12, *arguments).code in (0, 3)
    done = stepgym("replay", out)
    assert done.code == 0
    assert "env_error 3" in done.out
    said = json.loads(stepgym("replay", out, "--attempts", "--json").out)
    assert (said["played"], said["equal"], said["skipped"]) == (14, 14, {})
    healed = stepgym("replay", changed(out, lambda t: replace(t, env_config={})), "--attempts")
    assert healed.code == 1
    assert "reset outcome: [-env_error: RuntimeError: this box is nailed shut-]{+no failure+}" in healed.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "no such run"),
        (("RUN", "--outcome", "complete"), "did you mean 'completed'?"),
        (("RUN", "--phase", "test"), "no trajectory fits; phases here: rollout"),
        (("RUN", "--limit", "0"), "--limit"),
        (("RUN", "--env", "sqll"), "unknown environment 'sqll'"),
        (("RUN", "--env", "colors:Colours"), "there is no module 'colors'"),
    ],
)
def test_bad_input_is_one_line(
    stepgym: Callable[..., Any], played: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = stepgym("replay", *(played if word == "RUN" else word for word in arguments))
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1
