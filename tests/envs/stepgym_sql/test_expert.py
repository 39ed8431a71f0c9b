from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from stepgym_sql.env import SQLEnv
from stepgym_sql.generate.schemas import SCHEMA_NAMES
from stepgym_sql.generate.tasks import KINDS, rebuild_plan

from stepgym.env.task import Task
from stepgym.errors import UserError

TINY: dict[str, Any] = {
    "instructions": "none",
    "observation_format": "brief",
    "show_schema": False,
    "kinds": ["count", "filter", "aggregate"],
    "schema_names": ["shop", "library", "league"],
    "rows": 8,
    "tables": 1,
    "columns": 4,
    "column_types": False,
    "paraphrase": False,
}


def play(config: dict[str, Any], task: Task, seed: int = 0, **options: Any) -> tuple[float, list[Any], dict[str, Any]]:
    env = SQLEnv(workers=2, **config)
    env.reset(seed=seed, options={"task": task})
    turns: list[Any] = []
    info: dict[str, Any] = {}
    total = 0.0
    for turn in env.expert(env.task, **options):
        turns.append(turn)
        _, reward, terminated, truncated, info = env.step(turn)
        total += reward
        if terminated or truncated:
            break
    return total, turns, info


@pytest.mark.parametrize("actions", ["tags", "tools"])
@pytest.mark.parametrize("show_schema", [True, False])
def test_the_expert_always_succeeds(actions: str, show_schema: bool) -> None:
    config = {"actions": actions, "show_schema": show_schema}
    kinds, schemas = Counter[str](), Counter[str]()
    for task in SQLEnv(workers=2, **config).tasks("test")[:210]:  # type: ignore[arg-type]
        total, turns, info = play(config, task)
        assert total == 1.0, (task, turns, info)
        assert info["success"]
        assert show_schema or len(turns) >= 2
        kinds[task.data["kind"]] += 1
        schemas[task.data["schema"]] += 1
    assert set(kinds) == set(KINDS)
    assert set(schemas) == set(SCHEMA_NAMES)


def test_the_tiny_configuration_takes_three_turns() -> None:
    tasks = SQLEnv(**TINY).tasks("train")[:60]
    for task in tasks:
        total, turns, _ = play(TINY, task)
        assert total == 1.0
        assert [turn.split("</think>")[0] for turn in turns] == ["<think>tables", "<think>values", "<think>solve"]
        assert turns[0].endswith("<sql>SELECT sql FROM sqlite_master</sql>")


def test_mistakes_are_decisions_and_always_wrong() -> None:
    tasks = SQLEnv(**TINY).tasks("train")
    always = [play(TINY, task, mistakes=1.0) for task in tasks[:40]]
    assert all(total == 0.0 for total, _, _ in always)
    assert all(len(turns) == 2 for _, turns, _ in always)
    half = [play(TINY, task, seed, mistakes=0.5) for seed, task in enumerate(tasks[:150])]
    assert 0.2 < sum(total for total, _, _ in half) / len(half) < 0.6
    assert all(total in (0.0, 1.0) for total, _, _ in half)
    assert {len(turns) for _, turns, _ in half} == {2, 3}
    columns = [play(TINY, task, seed, mistakes=1.0, decisions=("column",)) for seed, task in enumerate(tasks[:40])]
    assert all(len(turns) == 3 for _, turns, _ in columns)
    assert 0 < sum(total for total, _, _ in columns) < 40  # a count has no column to mistake


def test_mistakes_come_from_the_seed() -> None:
    task = SQLEnv(**TINY).tasks("train")[3]
    same = [play(TINY, task, seed=7, mistakes=0.5)[1] for _ in range(3)]
    assert same[0] == same[1] == same[2]
    others = [tuple(play(TINY, task, seed=seed, mistakes=0.5)[1]) for seed in range(12)]
    assert len(set(others)) > 1


def test_the_expert_keeps_to_what_is_allowed() -> None:
    task = SQLEnv(**TINY).tasks("train")[0]
    assert len(play({**TINY, "allow_looking": False}, task)[1]) == 1
    total, turns, _ = play({**TINY, "max_turns": 2}, task)
    assert (total, len(turns)) == (1.0, 2)
    assert play({**TINY, "max_turns": 1}, task)[0] == 1.0


@pytest.mark.parametrize("options", [{"mistakes": 2}, {"decisions": ["guess"]}, {"errors": 1}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    env = SQLEnv(**TINY)
    env.reset(seed=0)
    with pytest.raises(UserError, match="expert"):
        next(env.expert(env.task, **options))


def test_not_looking_at_the_values_is_clearly_worse() -> None:
    """Even who knows the table, the column and every way to spell gets few right by writing the same way always."""
    env = SQLEnv(**TINY)
    tasks = env.tasks("test")[:100]
    right = 0
    for task in tasks:
        plan = rebuild_plan(task)
        spelled = plan.slots["value"]
        env.reset(options={"task": task})
        guess = str(task.answer).replace(spelled.right, str(spelled.wrong).upper())
        *_, info = env.step(f"<think>solve</think><solution>{guess}</solution>")
        right += info["success"]
    assert 5 < right < 40
