"""The check that CI makes of a short quickstart: it passes for a whole run, and notices what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = {"success_before": 0.3, "success_after": 0.9, "held_out_tasks": 8, "updates": 2, "seed": 0, "wall_s": 1.5}


def write_run(run: Path, **changes: Any) -> Path:
    """A run's folder as a training leaves it, with changes to its summary."""
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "metrics.jsonl").write_text('{"update": 1}\n')
    (run / "curve.png").write_bytes(b"\x89PNG")
    (run / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    with TrajectoryStore(run / "trajectories", mode="a") as store:
        step = Step(prompt_ids=np.arange(3), response_ids=np.arange(2))
        store.append(Trajectory(id=TrajectoryId("test", 0, "a", 0), outcome=Outcome.COMPLETED, steps=(step,)))
    return run


def check(run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "check_quickstart.py"), str(run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_whole_run_passes(tmp_path: Path) -> None:
    done = check(write_run(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "success 0.300 -> 0.900 on 8 held-out tasks, 1 trajectories" in done.stdout


def lose_curve(run: Path) -> None:
    (run / "curve.png").unlink()


def damage_store(run: Path) -> None:
    for shard in (run / "trajectories").glob("*.parquet"):
        shard.write_bytes(b"PAR1")


@pytest.mark.parametrize(
    ("changes", "harm", "said"),
    [
        ({"success_after": 0.3}, None, "nothing was learned"),
        ({"held_out_tasks": 0}, None, "nothing was held out"),
        ({}, lose_curve, "curve.png is missing"),
        ({}, damage_store, "cannot read this trajectory shard"),
    ],
)
def test_a_run_that_is_not_whole_fails(
    changes: dict[str, Any], harm: Callable[[Path], None] | None, said: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", **changes)
    if harm is not None:
        harm(run)
    done = check(run)
    assert done.returncode != 0
    assert said in done.stderr
