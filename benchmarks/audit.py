"""How many steps a minute `stepgym audit` checks, without the model check.

The episodes are those of `rollout_overhead.py`: 8 turns, each of 300 sampled and 200 observed tokens, under a
byte-level BPE tokenizer with ChatML that is trained on the standard library's source text; responses and observations
are 64 different texts each. They are played through `rollout` into a store with a saved renderer, and every check that
needs no model runs over them in one process with one thread. Reading the store alone is measured beside it.

Run it with `python benchmarks/audit.py [--json FILE]`. It exits with 1 when fewer than `--limit` steps are checked a
minute, or when the audit finds a fault.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console
from rich.table import Table
from rollout_overhead import AsyncEnv, Workload, hardware, timed

from stepgym import TrajectoryStore
from stepgym.inspect.audit import Audit, audit
from stepgym.inspect.audit.rows import read_rows
from stepgym.model.renderer_files import save_renderer
from stepgym.record.shard import list_shards


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--generated", type=int, default=300, help="sampled tokens per turn")
    parser.add_argument("--observed", type=int, default=200, help="observed tokens per turn")
    parser.add_argument("--vocabulary", type=int, default=16384, help="entries of the tokenizer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=20_000, help="least steps a minute (median)")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    before = hardware()
    work = Workload(
        vocab_size=options.vocabulary, generated=options.generated, observed=options.observed, megabytes=4.0
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        save_renderer(work.renderer, run / "renderer")
        with TrajectoryStore(run / "trajectories", "a") as store:
            counts = work.play(AsyncEnv, options.episodes, options.turns, store)
        audits: list[Audit] = []
        checked = timed(lambda: audits.append(audit(run)), options.repeats)
        shards = list_shards(run / "trajectories")
        reading = timed(lambda: sum(1 for _ in read_rows(shards)), options.repeats)
    found = audits[-1]
    faults = found.count("error") + found.count("warning")
    per_minute = 60 * found.steps / checked["median_s"]
    table = Table("", "steps", "tokens", "wall, s", "CPU, s", "steps a minute")
    for name, row in (("audit, every check but the model's", checked), ("reading the store alone", reading)):
        table.add_row(
            name,
            f"{found.steps:,}",
            f"{found.tokens:,}",
            f"{row['median_s']:.2f} ({row['min_s']:.2f}-{row['max_s']:.2f})",
            f"{row['median_cpu_s']:.2f}",
            f"{60 * found.steps / row['median_s']:,.0f}",
        )
    Console(width=120).print(table)
    result = {
        "benchmark": "audit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": before,
        "episodes": options.episodes,
        "turns": options.turns,
        "tokens_per_turn": counts["tokens_per_turn"],
        "steps": found.steps,
        "tokens": found.tokens,
        "checks": sum(each.status != "skipped" for each in found.checks),
        "faults": faults,
        "audit": checked,
        "reading": reading,
        "steps_per_minute": per_minute,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if per_minute >= options.limit and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
