"""docs/metrics.md has every metric that there is, and no alarm or sink that there is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepgym.config import describe
from stepgym.env.base import Env
from stepgym.env.messages import user
from stepgym.env.task import Task
from stepgym.errors import ActionError
from stepgym.run.folder import run_folder
from stepgym.train.alarm_rules import RULES
from stepgym.train.loop import train
from stepgym.train.recipe import check_recipe
from stepgym.train.sinks import SINKS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


class Light(Env):
    """Say red or green; green wins."""

    stop = ("</say>",)
    max_turns = 2

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{number}", prompt="Go?", answer="green") for number in range(24)]

    def begin(self, task: Task) -> Any:
        return [user(task.prompt)]

    def act(self, message: Any) -> Any:
        if message["text"] not in ("<say>red</say>", "<say>green</say>"):
            raise ActionError("say red or green", status="no_action")
        won = float(message["text"] == "<say>green</say>")
        return [], won, True, False, {"reward_parts": {"green": won}}

    @classmethod
    def expert(cls, task: Task) -> Any:
        return ["<say>red</say>" if int(task.id.rpartition("-")[2]) % 2 else "<say>green</say>"]


def first_cells(heading: str) -> list[str]:
    """The code spans in the first cell of every row below a heading."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(heading)]
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


METRICS = first_cells("What the numbers mean")


def is_on_the_page(name: str) -> bool:
    return any(re.fullmatch(re.sub(r"[A-Z]+", "[^/]+", known), name) for known in METRICS)


def test_every_metric_of_a_real_run_is_on_the_page(tmp_path: Path) -> None:
    recipe = {
        "env": {"kind": f"{__name__}:Light"},
        "model": {
            "kind": "tiny", "vocab_size": 320, "layers": 1, "width": 32, "heads": 2, "context_length": 96,
            "corpus_tasks": 16, "special_tokens": ["<say>", "</say>"],
        },
        "rollout": {"samples": 4, "max_response_tokens": 10},
        "warm_start": {"tasks": 16, "sft": {"updates": 30, "batch_size": 16, "optimizer": {"learning_rate": 1e-2}}},
        "algorithm": {"kl": {"kind": "k3"}, "mini_batches": 2},
        "budget": {"iterations": 2, "tasks_per_iteration": 4},
        "evaluation": {"every": 1, "validation_tasks": 2, "test_tasks": 2},
        "checkpoint": {"every": 1},
        "threads": 1,
    }  # fmt: skip
    plan = check_recipe(recipe, tmp_path / "recipe.yaml")
    with run_folder(tmp_path / "run", config=plan.model_dump(mode="json"), digest=plan.digest) as folder:
        train(plan, folder)
        rows = list(folder.metrics())
        summary = folder.summary()
    names = {name for row in rows if row["iteration"] for name in row}
    expected = {
        "outcome/completed",
        "reward/completed",
        "turns_max",
        "truncated_rate",
        "kl",
        "entropy",
        "tokens_unique",
    }
    expected |= {"seconds/rollout", "seconds/update", "seconds/evaluation", "seconds/checkpoint", "memory_rss_gib"}
    expected |= {"sharing", "sampled_tokens_per_second", "validation_success", "sampler_entropy", "learning_rate"}
    assert expected <= names
    assert [name for name in sorted(names) if not is_on_the_page(name)] == []
    warm = {name for row in rows if not row["iteration"] for name in row["warm_start"]}
    assert [name for name in sorted(warm) if f"`{name}`" not in PAGE] == []
    assert summary is not None
    assert summary["totals"]["tokens_unique"] == sum(row.get("tokens_unique", 0) for row in rows)
    assert isinstance(summary["alarms"], list)
    json.dumps(summary, allow_nan=False)


def test_alarms_on_the_page_are_the_rules_with_their_levels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([\d.]*) ?\|", PAGE.split("## Alarms")[1], re.MULTILINE)
    levels = {rule.name: rule.level for rule in RULES if rule.name != "gradient_not_finite"}
    assert {name: float(level) if level else None for name, level in rows if name in levels} == levels
    assert [name for name, _ in rows] == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", SINKS.names())
def test_sinks_on_the_page_have_their_options(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| (.*) \| `pip", PAGE, re.MULTILINE)
    assert [field.name for field in describe(SINKS.get(name)) if f"`{field.name}" not in row] == []
