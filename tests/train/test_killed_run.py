"""A run that is killed at any moment, and resumed, ends with the weights and the metrics of one that was not.

To the last bit, on the CPU, with an engine whose responses do not depend on what else it samples: one request at a
time, no cache. Each run is killed once, with SIGKILL, at a point that killed_at.py puts into its way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from coin import RECIPE
from safetensors.torch import load_file

from stepgym.record.digest import content_digest
from stepgym.record.store import TrajectoryStore
from stepgym.train.checkpoint import CheckpointStore

PLAIN: dict[str, Any] = {
    **RECIPE,
    "env": {"kind": "killed_at:HalfDull"},
    "engine": {"kind": "transformers", "max_batch_size": 1, "prefix_cache": False},
    "algorithm": {"mini_batches": 2, "optimizer": {"learning_rate": 1e-3, "warmup_updates": 2}},
    "refill": {"rounds": 1},
    "evaluation": {"every": 2, "validation_tasks": 4, "test_tasks": 6},
    "checkpoint": {"every": 2, "keep": 2},
    "budget": {"iterations": 4, "tasks_per_iteration": 4},
}
RECIPES = {
    "one after the other": (
        PLAIN,
        (
            "expert",
            "warm start",
            "first evaluation",
            "rollout",
            "refill",
            "before update",
            "between mini-batches",
            "before metrics",
            "after metrics",
            "validation",
            "before checkpoint",
            "in checkpoint",
            "before rename",
            "after rename",
        ),
    ),
    "one step off": (
        {**PLAIN, "overlap": "one_step_off"},
        ("rollout", "between mini-batches", "before rename"),
    ),
    "an adapter with dropout": (
        {
            **PLAIN,
            "env": {"kind": "killed_at:Anything"},
            "policy": {"lora": {"rank": 4, "dropout": 0.1}},
            "algorithm": {**PLAIN["algorithm"], "kl": "k3"},
            "warm_start": None,
            "refill": {},
        },
        ("between mini-batches", "after rename"),
    ),
}
NOT_THE_SAME = ("seconds", "iteration_s", "memory_", "_per_second")


@pytest.fixture(scope="module", params=RECIPES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    """The folder of the runs, and how their processes ended."""
    fields, points = RECIPES[request.param]
    out = tmp_path_factory.mktemp("killed")
    return out, run_and_kill(out, fields, points)


def run_and_kill(out: Path, fields: Mapping[str, Any], points: Sequence[str]) -> dict[str, Any]:
    """One run that is not killed, and one for each point. Returns how their processes ended."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "games"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(here / "killed_at.py"), str(out), json.dumps(fields), *points],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0
    ended: dict[str, Any] = json.loads(done.stdout)
    return ended


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [_timeless(row) for row in found]


def _timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _timeless(value) if isinstance(value, Mapping) else value
        for name, value in row.items()
        if not name.startswith(NOT_THE_SAME) and not name.endswith(NOT_THE_SAME)
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights, optimizer, random generators.

    Not Python's own generator: no part of training draws from it, and libraries that do draw for names and waits.
    """
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {f"{file.parent.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in found.items() if not re.search(r"random/\d+/python", name)}


@pytest.mark.slow
def test_every_killed_run_ends_as_the_one_that_was_not(runs: tuple[Path, Mapping[str, Any]]) -> None:
    out, ended = runs
    assert ended.pop("whole") == [0]
    assert ended
    assert {point: how for point, how in ended.items() if how != [-9, 0]} == {}  # all were killed, all came to the end
    whole = out / "whole"
    expected, store = rows(whole), TrajectoryStore(whole / "trajectories")
    assert [row["iteration"] for row in expected if row["iteration"]] == [1, 2, 3, 4]
    assert all(row.get("refill_rounds", 1) == 1 for row in expected)
    assert expected[-1]["update"] >= 5  # a mini-batch without signal makes none
    digest, final = content_digest(store), CheckpointStore(whole / "checkpoints").latest()
    assert final is not None
    weights = tensors(final.path)
    assert len(weights) > 20
    for point in ended:
        killed = out / point
        assert rows(killed) == expected, point
        latest = CheckpointStore(killed / "checkpoints").latest()
        assert latest is not None
        assert (latest.update, latest.score, latest.extra) == (final.update, final.score, final.extra), point
        found = tensors(latest.path)
        assert found.keys() == weights.keys(), point
        assert {name for name, tensor in weights.items() if not torch.equal(tensor, found[name])} == set(), point
        assert content_digest(TrajectoryStore(killed / "trajectories")) == digest, point
        one, two = (json.loads((folder / "summary.json").read_text()) for folder in (whole, killed))
        for name in ("success_before", "success_after", "updates", "best_iteration", "outcomes"):
            assert one[name] == two[name], point


@pytest.mark.slow
def test_a_run_whose_rollouts_are_asynchronous_goes_on_too(tmp_path: Path) -> None:
    """Which weights sample which token depends on timing, so it ends elsewhere; nothing is lost or played twice."""
    fields = {**PLAIN, "overlap": {"kind": "async", "lookahead": 2, "max_staleness": 2}, "refill": {}}
    ended = run_and_kill(tmp_path, fields, ["between mini-batches"])
    assert ended == {"whole": [0], "between mini-batches": [-9, 0]}
    killed = tmp_path / "between mini-batches"
    assert [row["iteration"] for row in rows(killed)] == [0, 1, 2, 3, 4]
    with TrajectoryStore(killed / "trajectories") as store:
        final = store.ids(final_only=True)
        assert len({(key.group, key.sample) for key in final}) == len(final)
    for row in rows(killed)[1:]:
        played = [key for key in final if (key.phase, key.iteration) == ("train", row["iteration"])]
        assert len(played) == 16 + row["stale_dropped"]
        assert row["members"] == 16
