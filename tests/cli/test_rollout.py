"""`stepgym rollout`: the expert or the model plays a split into a store; what is there is not played again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepgym.record.store import TrajectoryStore


def test_the_expert_plays_a_split(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = stepgym("rollout", recipe, "--expert", "--tasks", 6, "--split", "validation", "--out", out, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["episodes"], said["tasks"], said["outcomes"]) == (24, 6, {"completed": 24})
    assert said["success"] == said["mean_reward"] == 1.0
    assert 2.0 < said["turns_mean"] < 3.0  # the warm start's expert makes a mistake now and then
    summary = json.loads((out / "summary.json").read_text())
    assert {name: summary[name] for name in said} == said
    assert (summary["tasks_asked"], summary["split"], summary["seed"]) == (6, "validation", 0)
    with TrajectoryStore(out / "trajectories") as store:
        steps = [step for trajectory in store for step in trajectory.steps]
    assert {step.sampler for step in steps} == {"scripted"}
    assert all(step.logprobs is None for step in steps)


def test_more_of_it_plays_only_what_is_missing(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    """A run that was cut off is one whose store holds a part: here one shard of two is taken away."""
    out = tmp_path / "run"
    arguments = ("rollout", recipe, "rollout.samples=1", "--expert", "--tasks", 8, "--out", out, "--json")
    first = json.loads(stepgym(*arguments).out)
    shards = sorted((out / "trajectories").glob("*.parquet"))
    with TrajectoryStore(out / "trajectories") as store:
        kept = list(store)[:5]
    for shard in shards:
        shard.unlink()
    with TrajectoryStore(out / "trajectories", "a") as store:
        for trajectory in kept:
            store.append(trajectory)
    again = json.loads(stepgym(*arguments).out)
    assert {name: again[name] for name in first if name != "wall_s"} == {n: first[n] for n in first if n != "wall_s"}
    with TrajectoryStore(out / "trajectories") as store:
        assert len(store) == 8
        assert [t.started_at for t in store][:5] == [t.started_at for t in kept]


def test_the_recipes_model_plays(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = stepgym("rollout", recipe, "rollout.samples=2", "--tasks", 5, "--seed", 3, "--out", out)
    assert done.code == 0, done.err
    assert "success" in done.out
    assert f"run  {out}" in done.out
    assert "outcomes: " in done.err
    with TrajectoryStore(out / "trajectories") as store:
        found = list(store)
    assert [(t.id.phase, t.id.sample) for t in sorted(found, key=lambda t: (t.id.task_id, t.id.sample))] == [
        ("rollout", sample) for _ in range(5) for sample in range(2)
    ]
    steps = [step for trajectory in found for step in trajectory.steps]
    assert all(step.sampler == "policy" and step.logprobs is not None for step in steps)
    assert max(len(step.response_ids) for step in steps if step.response_ids is not None) <= 8
    assert stepgym("rollout", recipe, "rollout.samples=3", "--tasks", 5, "--seed", 3, "--out", out).code == 2


def test_too_many_failures_are_incomplete(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> None:
    done = stepgym(
        "rollout", recipe, "env.break_tasks=1", "rollout.samples=1", "--expert", "--tasks", 6, "--out", tmp_path / "r"
    )
    assert done.code == 3
    assert "INCOMPLETE: 1 of 6 episodes failed" in " ".join(done.out.split())
    assert "suspect: " in done.err
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["failed_attempts"] == {"env_error": 2}
    assert "this box is nailed shut" in done.err


def test_an_interrupt_keeps_what_was_played(recipe: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    out, diary = tmp_path / "run", tmp_path / "diary"
    corpus = 8  # the tokenizer is made from as many episodes before
    changes = ["rollout.samples=1", "rollout.concurrency=1", f"model.corpus_tasks={corpus}"]
    changes += ["env.delay=0.05", f"env.diary={diary}"]
    command = [sys.executable, "-m", "stepgym.cli.main", "rollout", str(recipe), *changes, "--expert", "--tasks", "48"]
    process = subprocess.Popen([*command, "--out", str(out)], env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not diary.exists() or len(diary.read_text().splitlines()) < corpus + 4):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == f"interrupted; the same command with --out {out} goes on\ninterrupted\n"
    with TrajectoryStore(out / "trajectories") as store:
        assert 3 <= len(store) < 48
        assert {str(trajectory.outcome) for trajectory in store} == {"completed"}


@pytest.mark.parametrize("arguments", [(), ("--expert",)])
def test_without_a_folder_the_recipe_names_it(
    stepgym: Callable[..., Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = stepgym("rollout", recipe, "rollout.samples=1", "--tasks", 2, *arguments)
    assert done.code == 0, done.err
    (folder,) = Path("runs").glob(f"{recipe.parent.name}-tiny-rollout/*-0")
    assert f"run  {folder}" in done.out
