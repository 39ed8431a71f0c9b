"""`stepgym train`: a run writes what DESIGN names, and one that is killed or interrupted goes on where it was."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepgym.config import load_yaml
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import TrajectoryId
from stepgym.train.recipe import load_recipe

# What the store shall hold in the end: phase, iteration -> episodes, by the recipe of conftest.py.
EPISODES = {("expert", 0): 48, ("test", 0): 12, ("test-greedy", 0): 12, ("validation", 2): 8}
EPISODES |= {("train", iteration): 16 for iteration in (1, 2, 3)}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_complete(folder: Path) -> dict[str, Any]:
    """That a folder holds a whole run, with nothing twice. Returns its summary."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    counts = Counter(
        (key.phase, key.iteration) for key in TrajectoryStore(folder / "trajectories").ids(final_only=True)
    )
    best = summary["best_iteration"]
    assert counts == {**EPISODES, ("test", best): 12, ("test-greedy", best): 12}
    everything = [trajectory.id for trajectory in TrajectoryStore(folder / "trajectories")]
    assert len(everything) == len(set(everything))
    stored = sum(len(table) for table in map(read_ids, (folder / "trajectories").glob("*.parquet")))
    assert stored == len(everything)
    assert [row["iteration"] for row in rows(folder)] == [0, 1, 2, 3]
    return summary


def read_ids(shard: Path) -> list[str]:
    import pyarrow.parquet as pq

    ids: list[str] = pq.read_table(shard, columns=["id"]).column("id").to_pylist()
    return ids


def test_a_run_writes_what_it_promises(trained: Path, recipe: Path) -> None:
    summary = check_complete(trained)
    assert {"success_before", "success_after", "held_out_tasks", "updates", "seed", "wall_s"} <= set(summary)
    assert summary["held_out_tasks"] == 12
    assert all(0 <= summary[name] <= 1 for name in ("success_before", "success_after", "greedy_before", "greedy_after"))
    assert json.loads((trained.parent / "stdout").read_text()) == summary
    assert 0 < summary["updates"] <= 3
    assert (trained / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(math.isfinite(v) for row in rows(trained) for v in row.values() if isinstance(v, float))
    assert rows(trained)[2]["validation_success"] is not None
    tests = list(TrajectoryStore(trained / "trajectories").read(phase="test", iteration=0))
    assert summary["success_before"] == sum(bool(t.success) for t in tests) / 12
    assert load_recipe(trained / "config.yaml").digest == load_recipe(recipe).digest
    errors = (trained.parent / "stderr").read_text()
    assert "what training does with each outcome" in errors
    assert "Writing model shards" not in errors


def test_the_exported_model_is_the_best_one(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["best_iteration"] == 2  # the only one that was measured on the validation split
    model = Path(summary["model"])
    state = json.loads((model.parent / "state.json").read_text())
    assert (state["extra"]["iteration"], state["score"]) == (2, rows(trained)[2]["validation_success"])
    assert (model / "model.safetensors").exists()
    assert (model / "tokenizer.json").exists()


def test_a_finished_run_is_finished(trained: Path, recipe: Path, stepgym: Callable[..., Any]) -> None:
    """Running it again plays nothing, learns nothing, and says the same."""
    before = sorted(path.name for path in (trained / "trajectories").iterdir())
    metrics = (trained / "metrics.jsonl").read_text()
    done = stepgym("train", recipe, "--out", trained, "--json")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (trained / "trajectories").iterdir()) == before
    assert (trained / "metrics.jsonl").read_text() == metrics
    first, again = json.loads((trained.parent / "stdout").read_text()), json.loads(done.out)
    for name in ("wall_s", "seconds"):
        del first[name], again[name]
    assert again == first


def test_another_recipe_is_refused(trained: Path, recipe: Path, stepgym: Callable[..., Any]) -> None:
    done = stepgym("train", recipe, "budget.iterations=4", "--out", trained)
    assert done.code == 2
    assert done.err.startswith(f"error: {trained}: this run was made with another config")
    assert done.err.count("\n") == 1
    assert stepgym("train", recipe, "--seed", 1, "--out", trained).code == 2


# A process that has imported everything, and forks a child for each command: starting Python and torch anew for every
# kill would take more time than all the training. The child is killed with SIGKILL as soon as `wanted` holds.
KILLER = """
import os, signal, sys, time
from pathlib import Path
import torch, transformers, pyarrow.dataset
transformers.Qwen3ForCausalLM, transformers.PreTrainedTokenizerFast
import stepgym.cli.train, stepgym.train.loop, stepgym.cli.tables
from stepgym.cli.main import run

torch.set_num_threads(1)
recipe, out = sys.argv[1], Path(sys.argv[2])

def shards(): return len(list(out.glob("trajectories/*.parquet")))
def lines(): return (out / "metrics.jsonl").read_text().count("\\n") if (out / "metrics.jsonl").exists() else 0
def checkpoints(): return len(list(out.glob("checkpoints/update-*")))

MOMENTS = {
    "made": lambda: (out / ".lock").exists(),
    "warm start": lambda: shards() > 0,
    "before": lambda: checkpoints() > 0,
    "rollout 2": lambda: lines() > 1,
    "checkpoint 2": lambda: (out / "checkpoints").is_dir() and checkpoints() > 1,
    "after": lambda: lines() > 3,
    "never": lambda: False,
}
print("ready", flush=True)
for line in sys.stdin:
    moment, _, delay = line.strip().partition(",")
    child = os.fork()
    if child == 0:
        sys.stdin.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(run(["train", recipe, "--out", str(out)]))
    ended = 0
    while not ended and not MOMENTS[moment]():
        time.sleep(0.002)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_killed_run_goes_on(tmp_path: Path, recipe: Path, trained: Path, environment: dict[str, str]) -> None:
    """Promise 15 for a whole run: killed at every stage, it ends with no trajectory lost or doubled."""
    out, delays = tmp_path / "run", random.Random(0)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLER), str(recipe), str(out)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    flushed: set[TrajectoryId] = set()
    for moment in ("made", "warm start", "before", "rollout 2", "checkpoint 2", "after"):
        process.stdin.write(f"{moment},{delays.uniform(0, 0.05)}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "-9\n", moment
        if (out / "trajectories").is_dir():
            present = set(TrajectoryStore(out / "trajectories").ids())
            assert flushed <= present, moment
            flushed = present
    output, errors = process.communicate("never,0\n", timeout=120)
    assert output == "0\n", errors
    assert "Traceback" not in errors
    summary = check_complete(out)
    assert flushed <= set(TrajectoryStore(out / "trajectories").ids())
    assert len(flushed) > 100

    # Resuming changes nothing of what is learned: the same numbers as the run that was never killed.
    undisturbed = json.loads((trained / "summary.json").read_text())
    same = ("success_before", "success_after", "greedy_before", "greedy_after", "updates", "best_iteration")
    assert {name: summary[name] for name in same} == {name: undisturbed[name] for name in same}
    for resumed, whole in zip(rows(out)[1:], rows(trained)[1:], strict=True):
        for name in ("reward_mean", "turns_mean", "updates", "grad_norm"):
            assert resumed[name] == pytest.approx(whole[name], rel=1e-3), (resumed["iteration"], name)


def test_two_processes_on_one_folder_and_an_interrupt(
    tmp_path: Path, recipe: Path, stepgym: Callable[..., Any], environment: dict[str, str]
) -> None:
    out = tmp_path / "run"
    slow = ["env.delay=0.5", "warm_start.tasks=8"]
    command = [sys.executable, "-m", "stepgym.cli.main", "train", str(recipe), *slow, "--out", str(out)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    errors = first.stderr.readline()
    assert errors == f"run: {out}\n"
    second = stepgym("train", recipe, *slow, "--out", out)
    assert (second.code, second.err) == (2, f"error: {out}: another process is working on this run\n")
    first.send_signal(2)
    output, errors = first.communicate(timeout=60)
    assert first.returncode == 130
    assert output == ""
    assert errors.endswith(
        f"interrupted; go on with: stepgym train {recipe} {' '.join(slow)} --out {out}\ninterrupted\n"
    )
    assert "Traceback" not in errors


def test_failures_of_the_environment_never_become_reward(
    tmp_path: Path, recipe: Path, stepgym: Callable[..., Any]
) -> None:
    out = tmp_path / "run"
    changes = ["env.fail_every=9", "env.break_tasks=2", "warm_start.tasks=8", "warm_start.sft.updates=25"]
    changes += ["evaluation.test_tasks=0", "evaluation.every=0", "budget.iterations=2", "budget.tasks_per_iteration=24"]
    changes += ["rollout.samples=2"]
    done = stepgym("train", recipe, *changes, "--out", out)
    assert done.code == 0, done.err
    with TrajectoryStore(out / "trajectories") as store:
        failed = 0
        for row in rows(out)[1:]:
            final = list(store.read(phase="train", iteration=row["iteration"], final_only=True))
            scored = [t for t in final if t.reward is not None]
            lost = [t for t in final if t.reward is None]
            failed += len(lost)
            assert {str(t.outcome) for t in lost} <= {"env_error"}
            assert (row["dropped"], row["members"]) == (len(lost), len(scored))
            assert row["reward_mean"] == pytest.approx(sum(t.reward or 0.0 for t in scored) / len(scored))
            assert row["outcome/env_error"] == len(lost) if lost else "outcome/env_error" not in row
        assert failed >= 4  # the two boxes that are nailed shut, twice each
        assert any(not t.final and str(t.outcome) == "env_error" for t in store)
    assert json.loads((out / "summary.json").read_text())["success_after"] is None


def test_the_default_folder_is_named_after_the_recipe(
    tmp_path: Path, recipe: Path, stepgym: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ["warm_start=null", "budget.iterations=0", "evaluation.test_tasks=4", "evaluation.greedy=false", "seed=7"]
    done = stepgym("train", recipe, *changes)
    assert done.code == 0, done.err
    (folder,) = Path("runs").glob(f"{recipe.parent.name}-tiny/*-7")
    assert f"run      {folder}" in done.out
    assert load_yaml(folder / "config.yaml")["seed"] == 7
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["updates"], summary["iterations"], summary["success_before"]) == (0, 0, summary["success_after"])
    assert os.path.isabs(summary["model"]) or Path(summary["model"]).is_dir()
