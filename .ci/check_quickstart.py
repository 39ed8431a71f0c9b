"""Checks what a short quickstart left behind: its summary, its files, and a trajectory store that anybody can read."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(run: Path) -> None:
    """Raise `AssertionError`, saying what is wrong, unless the run in this folder is whole and the agent got better."""
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "curve.png", "trajectories", "checkpoints"):
        assert (run / name).exists(), f"{run / name} is missing"
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG"), "curve.png is no PNG file"

    summary = json.loads((run / "summary.json").read_text())
    for name in ("success_before", "success_after", "held_out_tasks", "updates", "seed", "wall_s"):
        assert name in summary, f"summary.json has no {name!r}"
    before, after = summary["success_before"], summary["success_after"]
    assert 0 <= before < after <= 1, f"success before is {before}, after is {after}: nothing was learned"
    assert summary["held_out_tasks"] > 0, "nothing was held out"
    assert summary["updates"] > 0, "nothing was updated"

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics, "metrics.jsonl is empty"

    from datasets import load_dataset

    from stepgym import TrajectoryStore

    with TrajectoryStore(run / "trajectories") as store:
        count = len(store)
        first = next(iter(store))
    assert first.steps, f"{first.id} has no steps"
    rows = load_dataset("parquet", data_files=str(run / "trajectories" / "*.parquet"), split="train")
    assert len(rows) == count > 0, f"datasets reads {len(rows)} trajectories, the store {count}"
    print(f"success {before:.3f} -> {after:.3f} on {summary['held_out_tasks']} held-out tasks, {count} trajectories")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
