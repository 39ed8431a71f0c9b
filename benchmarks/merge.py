"""How long it takes to merge the steps of a batch, and to build the token tree over it.

The batch is 512 trajectories of 8 turns; a turn samples 300 tokens and observes 200. Run it with
`python benchmarks/merge.py [--json FILE]`; it exits with 1 when merging takes longer than `--limit` seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from stepgym.record.merge import MergeReport, merge_steps
from stepgym.record.step import Step
from stepgym.record.token_tree import TokenTree

T = TypeVar("T")


def conversation(rng: np.random.Generator, turns: int, generated: int, observed: int, *, strip: int) -> list[Step]:
    """Turns of one trajectory. With `strip`, the first so many sampled tokens of a turn vanish from later prompts."""
    history = rng.integers(0, 150_000, observed, dtype=np.int32)
    steps = []
    for _ in range(turns):
        response = rng.integers(0, 150_000, generated, dtype=np.int32)
        logprobs = np.full(generated, -1.0, dtype=np.float32)
        steps.append(Step(prompt_ids=history, response_ids=response, logprobs=logprobs, reward=1.0))
        observation = rng.integers(0, 150_000, observed, dtype=np.int32)
        history = np.concatenate([history, response[strip:], observation])
    return steps


def timed(work: Callable[[], T], repeats: int) -> tuple[T, list[float]]:
    """The result of `work` and the wall seconds of each repeat."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return result, seconds


def measure(batch: list[list[Step]], repeats: int) -> dict[str, Any]:
    """Merge each trajectory and build one tree over all of them."""

    def merge() -> MergeReport:
        return sum((merge_steps(steps)[1] for steps in batch), MergeReport())

    report, merge_s = timed(merge, repeats)
    tree, tree_s = timed(lambda: TokenTree([step for steps in batch for step in steps]), repeats)
    return {
        "trajectories": len(batch),
        "steps": report.steps,
        "sequences": report.sequences,
        "tokens_before": report.tokens_before,
        "tokens_merged": report.tokens_after,
        "tokens_in_tree": len(tree),
        "merge_s": {"median": statistics.median(merge_s), "min": min(merge_s), "max": max(merge_s)},
        "tree_s": {"median": statistics.median(tree_s), "min": min(tree_s), "max": max(tree_s)},
    }


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--generated", type=int, default=300, help="sampled tokens per turn")
    parser.add_argument("--observed", type=int, default=200, help="observed tokens per turn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit", type=float, default=0.15, help="most seconds that merging may take (median)")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    options = parser.parse_args()
    sizes = (options.turns, options.generated, options.observed)
    workloads = {}
    for name, strip in (("turns extend each other", 0), ("half of each turn is stripped", options.generated // 2)):
        rng = np.random.default_rng(0)
        batch = [conversation(rng, *sizes, strip=strip) for _ in range(options.trajectories)]
        workloads[name] = measure(batch, options.repeats)
    table = Table("workload", "steps", "sequences", "tokens before", "merged", "in tree", "merge, s", "tree, s")
    for name, row in workloads.items():
        counts = [f"{row[key]:,}" for key in ("steps", "sequences", "tokens_before", "tokens_merged", "tokens_in_tree")]
        seconds = [
            f"{row[key]['median']:.3f} ({row[key]['min']:.3f}-{row[key]['max']:.3f})" for key in ("merge_s", "tree_s")
        ]
        table.add_row(name, *counts, *seconds)
    console = Console()
    console = console if console.width >= 120 else Console(width=120)
    console.print(table)
    result = {
        "benchmark": "merge",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(),
        "turns": options.turns,
        "generated": options.generated,
        "observed": options.observed,
        "repeats": options.repeats,
        "workloads": workloads,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    took = workloads["turns extend each other"]["merge_s"]["median"]
    return 0 if took <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
