"""trackio on this machine: what was logged is read back from its database."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio", reason="needs the package trackio: pip install 'stepgym[trackio]'")

PROGRAM = """
import sys
from pathlib import Path
from stepgym.run.folder import run_folder
from stepgym.train.metrics_log import MetricsLog
from stepgym.train.observer import Observer
from stepgym.train.sinks.config import MetricsConfig

config = MetricsConfig(sinks=({"kind": "trackio", "project": "tests", "name": "a-run"},))
for after, last in ((None, 3), (2, 5)):
    with run_folder(Path(sys.argv[1]), config={}, digest="d") as folder:
        log = MetricsLog(config, folder, Observer(), {"seed": 3})
        log.begin(after)
        for number in range((after or 0) + 1, last + 1):
            log.iteration(number, {"iteration": number, "reward_mean": number / 10, "truncated_rate": 0.9})
        log.close({"success_after": 0.5})

from trackio.sqlite_storage import SQLiteStorage
assert SQLiteStorage.get_runs("tests") == ["a-run"]
found = [(row["step"], row["reward_mean"]) for row in SQLiteStorage.get_logs("tests", "a-run")]
assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)], found
"""


def test_one_run_holds_every_iteration_once(tmp_path: Path) -> None:
    """In a process of its own: trackio decides where its database is when it is imported."""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ""
