"""What a recipe for two cores learns: three seeds, and what its agent can do elsewhere.

`stepgym train` for each seed. The first seed's model is then measured on tasks that it was not trained for, and where
it may not look (SQL) or search; and a run that may not in training either is made.

    python benchmarks/learning.py sql --out runs/sql-tiny --json benchmarks/results/sql_tiny.json
    python benchmarks/learning.py sql --out runs/sql-vllm --only-training engine=vllm   # the same, sampled by vLLM
    python benchmarks/learning.py search --out runs/search-tiny --json benchmarks/results/search_tiny.json
    python benchmarks/learning.py search-harder --seeds 0 --only-training --out runs/search-harder
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"


@dataclass(frozen=True)
class Subject:
    """A recipe, where else its agent is measured, and the override that takes its eyes from it."""

    recipe: Path
    blind: str
    elsewhere: dict[str, list[str]]


_SCHEMAS = "env.schema_names="
SUBJECTS = {
    "sql": Subject(
        RECIPES / "sql" / "tiny.yaml",
        "env.allow_looking=false",
        {
            "its own task mix": [],
            "looking forbidden": ["env.allow_looking=false"],
            "schemas never seen": [f"{_SCHEMAS}[clinic, airline, school, bank]"],
            "other questions: filters": ["env.kinds=[filter]"],
            "two tables, tables renamed too": ["env.names=varied", "env.tables=2"],
            "every kind of question, every schema": [
                *("env.kinds=null", f"{_SCHEMAS}null", "env.tables=3", "env.columns=null"),
            ],
        },
    ),
    "search": Subject(
        RECIPES / "search" / "tiny.yaml",
        "env.allow_search=false",
        {
            "its own questions": [],
            "searching forbidden": ["env.allow_search=false"],
            "another encyclopedia": ["env.seed=1"],
            "one hop": ["env.kinds=[one_hop]"],
            "three documents a search": ["env.topk=3"],
            "other relations": ["env.relations=[translator, setting, birthplace, burial_place]"],
            "every kind of question": [
                *("env.kinds=null", "env.relations=null", "env.sentences=4", "env.gaps=true", "env.aliases=true"),
                *("env.wording=varied", "env.names=full", "env.topk=3"),
            ],
        },
    ),
    "search-harder": Subject(RECIPES / "search" / "harder.yaml", "env.allow_search=false", {"its own questions": []}),
}


def stepgym(*arguments: str) -> dict[str, Any]:
    """Run a verb with --json and return what it printed."""
    command = [sys.executable, "-m", "stepgym.cli.main", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(
    recipe: Path, out: Path, seed: int, overrides: list[str], elsewhere: dict[str, list[str]]
) -> dict[str, Any]:
    run = out / f"seed-{seed}"
    summary = stepgym("train", str(recipe), "--seed", str(seed), "--out", str(run), *overrides)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["iteration"], row.get("success"), row.get("validation_success")) for row in rows if row["iteration"]]
    kept = {name: value for name, value in summary.items() if name != "model"}
    found: dict[str, Any] = {**kept, "curve": curve, "elsewhere": {}}
    for name, changes in elsewhere.items():
        result = stepgym(
            "eval",
            *("--recipe", str(run / "config.yaml"), "--engine", "transformers", "--model", summary["model"]),
            *("--tasks", "256", "--split", "test", "--out", str(out / f"seed-{seed}-{name.replace(' ', '-')}")),
            *changes,
        )
        found["elsewhere"][name] = {key: result[key] for key in ("success", "success_ci95", "turns_mean", "outcomes")}
        print(f"seed {seed}  {name:<40} success {result['success']:.3f}  turns {result['turns_mean']:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--only-training", action="store_true", help="leave out what the agent can do elsewhere")
    parser.add_argument("overrides", nargs="*", help="changes to the recipe")
    arguments = parser.parse_args()
    subject = SUBJECTS[arguments.subject]
    found = [
        measure(
            subject.recipe,
            arguments.out,
            seed,
            arguments.overrides,
            subject.elsewhere if seed == arguments.seeds[0] and not arguments.only_training else {},
        )
        for seed in arguments.seeds
    ]
    blind: dict[str, Any] = {}
    if not arguments.only_training:
        blind = stepgym(
            "train",
            str(subject.recipe),
            *("--seed", str(arguments.seeds[0]), "--out", str(arguments.out / "blind"), subject.blind),
            *arguments.overrides,
        )
        del blind["model"]
    print("seed  sampled before -> after   greedy before -> after   wall s")
    for row in found:
        print(
            f"{row['seed']:>4}  {row['success_before']:.3f} -> {row['success_after']:.3f}"
            f"            {row['greedy_before']:.3f} -> {row['greedy_after']:.3f}           {row['wall_s']:.0f}"
        )
    if blind:
        print(f"trained and tested with {subject.blind}: {blind['success_before']:.3f} -> {blind['success_after']:.3f}")
    if arguments.json:
        hardware = f"{platform.machine()}, {platform.system()}, {len(os.sched_getaffinity(0))} cores"
        report: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware,
            "recipe": str(subject.recipe.relative_to(ROOT)),
            "overrides": arguments.overrides,
            "seeds": found,
        }
        if blind:
            report["blind"] = blind
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
