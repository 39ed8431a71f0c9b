from __future__ import annotations

import json
import sqlite3

import pytest
from stepgym_sql.generate.schemas import SCHEMA_NAMES
from stepgym_sql.generate.tasks import KINDS, SPLITS, GeneratedTasks, GeneratorConfig, rebuild_plan
from stepgym_sql.generate.world import World, WorldSpec

from stepgym.env.task import Task
from stepgym.errors import EnvError, UserError

TINY = GeneratorConfig(
    kinds=("count", "filter", "aggregate"), rows=8, tables=1, columns=4, column_types=False, paraphrase=False
)


def rows_of(task: Task, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(":memory:")
    try:
        World(WorldSpec.from_dict(task.data)).fill(connection)
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_the_same_seed_split_and_index_give_the_same_task() -> None:
    for config in (GeneratorConfig(), TINY):
        first, second = GeneratedTasks(config, "train"), GeneratedTasks(config, "train")
        assert [first[i] for i in (0, 5, 999_999)] == [second[i] for i in (0, 5, 999_999)]
        assert first[-1] == first[len(first) - 1]
        assert [task.id for task in first[3:9:2]] == ["train-3", "train-5", "train-7"]
        assert list(first[:3]) == [first[0], first[1], first[2]]
    assert GeneratedTasks(GeneratorConfig(seed=1), "train")[0] != GeneratedTasks(GeneratorConfig(), "train")[0]
    with pytest.raises(IndexError):
        GeneratedTasks(TINY, "train")[1_000_000]


def test_no_database_of_one_split_is_in_another() -> None:
    config = GeneratorConfig(tables=1, rows=6)
    worlds = {split: {task.data["world"] for task in GeneratedTasks(config, split)[:100]} for split in SPLITS}
    assert all(len(seeds) == 100 for seeds in worlds.values())
    assert worlds["train"].isdisjoint(worlds["validation"] | worlds["test"])
    assert worlds["validation"].isdisjoint(worlds["test"])


def test_a_task_is_json_and_holds_a_recipe_not_the_data() -> None:
    for task in GeneratedTasks(GeneratorConfig(rows=300), "train")[:4]:
        text = json.dumps(task.to_dict())
        assert Task.from_dict(json.loads(text)) == task
        assert len(text) < 1200


def test_every_kind_asks_questions_of_many_schemas_and_has_answers() -> None:
    seen: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for kind in KINDS:
        for task in GeneratedTasks(GeneratorConfig(kinds=(kind,)), "test")[:8]:
            seen[kind].add(task.data["schema"])
            rows = rows_of(task, task.answer)
            assert rows
            assert any(value not in (None, 0) for row in rows for value in row)
            assert rebuild_plan(task).sql() == task.answer
            assert rebuild_plan(task).question == task.prompt
            assert "{" not in task.prompt + task.answer
    assert all(len(schemas) >= 3 for schemas in seen.values())


def test_wrong_decisions_give_wrong_answers() -> None:
    decided = 0
    for config in (TINY, GeneratorConfig()):
        for task in GeneratedTasks(config, "train")[:60]:
            plan = rebuild_plan(task)
            for name in plan.open_slots:
                decided += 1
                assert rows_of(task, plan.sql([name])) != rows_of(task, task.answer), task
    assert decided > 60


def test_one_table_leaves_out_the_kinds_that_need_two() -> None:
    kinds = GeneratorConfig(tables=1).every_kind
    assert "join_total" not in kinds
    assert set(kinds) < set(KINDS) == set(GeneratorConfig().every_kind)


def test_the_question_does_not_give_the_names_away() -> None:
    """Who writes the question's own words as the query is wrong almost always."""
    right = 0
    tasks = GeneratedTasks(TINY, "test")[:150]
    for task in tasks:
        plain = World(WorldSpec.from_dict({**task.data, "names": "plain", "spellings": "plain"}))
        names = dict(zip((t.table.word for t in plain.tables), (t.name for t in plain.tables), strict=True))
        world = World(WorldSpec.from_dict(task.data))
        guess = task.answer
        for stored in world.tables:
            guess = guess.replace(f"FROM {stored.name}", f"FROM {names[stored.table.word]}")
            for column in stored.columns:
                for word, spelled in column.spelled.items():
                    guess = guess.replace(f"'{spelled}'", f"'{word}'")
        try:
            right += rows_of(task, guess) == rows_of(task, task.answer)
        except sqlite3.OperationalError:
            pass
    assert right == 0


def test_top_rows_are_never_tied() -> None:
    for task in GeneratedTasks(GeneratorConfig(kinds=("top",), rows=12), "train")[:40]:
        head, limit = task.answer.rsplit(" LIMIT ", 1)
        key = head.split(" ORDER BY ")[1].split()[0]
        order = rows_of(task, head.replace("SELECT ", f"SELECT {key}, ", 1))
        keys = [row[0] for row in order[: int(limit) + 1]]
        assert len(set(keys)) == len(keys)


def test_schemas_of_the_splits_are_disjoint_on_request() -> None:
    config = GeneratorConfig(schemas="disjoint")
    parts = [set(config.schemas_of(split)) for split in SPLITS]
    assert set.union(*parts) == set(SCHEMA_NAMES)
    assert sum(map(len, parts)) == len(SCHEMA_NAMES)
    assert all(len(part) >= 2 for part in parts)
    assert config.schemas_of("test") == GeneratorConfig(schemas="disjoint", seed=9).schemas_of("test")
    for split, part in zip(SPLITS, parts, strict=True):
        assert {task.data["schema"] for task in GeneratedTasks(config, split)[:25]} <= part
    shared = GeneratorConfig()
    assert all(shared.schemas_of(split) == SCHEMA_NAMES for split in SPLITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("cont",)}, "unknown name 'cont' in kinds; did you mean 'count'"),
        ({"kinds": ()}, "kinds must not be empty"),
        ({"schema_names": ("zoo",)}, "unknown name 'zoo' in schema_names"),
        ({"rows": 0}, "rows must be from 4"),
        ({"tables": 9}, "tables must be from 1"),
        ({"columns": 1}, "columns must be from 2"),
        ({"kinds": ("without", "join_group"), "tables": 1}, "the kind 'join_group' needs two tables"),
        ({"schemas": "disjoint", "schema_names": ("shop", "bank")}, "at least three"),
    ],
)
def test_bad_options_are_one_clear_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        GeneratorConfig(**options)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_impossible_questions_are_said() -> None:
    config = GeneratorConfig(kinds=("count", "dates"), columns=2, schema_names=("clinic",))
    with pytest.raises(UserError, match="no question of the kind 'dates' can be asked of databases with rows=30"):
        list(GeneratedTasks(config, "train")[:10])


def test_data_of_another_version_is_noticed() -> None:
    task = GeneratedTasks(TINY, "train")[0]
    with pytest.raises(EnvError, match="another version"):
        rebuild_plan(Task(task.id, task.prompt, "SELECT 1", task.data))
