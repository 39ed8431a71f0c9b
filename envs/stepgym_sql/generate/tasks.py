"""Tasks without end: a sequence that makes each task from its seed, split and index when it is asked for."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, combinations
from typing import Any, Literal, TypeAlias, overload

from stepgym.env.task import Task
from stepgym.errors import EnvError, UserError
from stepgym.seeds import derive_seed
from stepgym_sql.compare import same_multiset
from stepgym_sql.generate import joins, questions
from stepgym_sql.generate.plan import Plan
from stepgym_sql.generate.schemas import SCHEMA_NAMES
from stepgym_sql.generate.world import Names, Variety, World, WorldSpec
from stepgym_sql.pool import Row

KINDS: Mapping[str, Any] = {
    "lookup": questions.lookup,
    "count": questions.count,
    "filter": questions.filtered,
    "compare": questions.compare,
    "aggregate": questions.aggregate,
    "group": questions.group,
    "having": questions.having,
    "order": questions.order,
    "top": questions.top,
    "nulls": questions.nulls,
    "dates": questions.dates,
    "distinct": questions.distinct,
    "duplicates": questions.duplicates,
    "above_average": questions.above_average,
    "join_lookup": joins.join_lookup,
    "join_filter": joins.join_filter,
    "join_group": joins.join_group,
    "join_total": joins.join_total,
    "without": joins.without,
}
"""The kinds of questions by name, each a function (world, random, paraphrase) -> Plan or None."""

SPLITS = ("train", "validation", "test")
TASKS_PER_SPLIT = 1_000_000
_ATTEMPTS = 400
_MOST_ANSWER_ROWS = 60
TWO_TABLE_KINDS = frozenset({"join_lookup", "join_filter", "join_group", "join_total", "without"})
SchemaSplit: TypeAlias = Literal["shared", "disjoint"]


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """What tasks are drawn from; the fields are the options of `SQLEnv` of the same names.

    Raises `UserError` for names that do not exist and numbers out of range.
    """

    seed: int = 0
    kinds: tuple[str, ...] | None = None
    schema_names: tuple[str, ...] | None = None
    schemas: SchemaSplit = "shared"
    rows: int = 30
    tables: int | None = None
    columns: int | None = None
    names: Names = "varied"
    spellings: Variety = "varied"
    column_types: bool = True
    paraphrase: bool = True

    def __post_init__(self) -> None:
        _check_names("kinds", self.kinds, KINDS)
        _check_names("schema_names", self.schema_names, SCHEMA_NAMES)
        for name, low, high in (("rows", 4, 5_000), ("tables", 1, 3), ("columns", 2, 10)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"sql: {name} must be from {low} to {high}, not {value}")
        over_two = sorted(TWO_TABLE_KINDS.intersection(self.kinds or ()))
        if self.tables == 1 and over_two:
            raise UserError(f"sql: the kind {over_two[0]!r} needs two tables; raise `tables` or choose other kinds")
        if self.schemas == "disjoint" and len(self.every_schema) < 3:
            raise UserError("sql: schemas: disjoint needs at least three schema_names, one for each split")

    @property
    def every_kind(self) -> tuple[str, ...]:
        """The kinds that are drawn from: those that were chosen, or all that such databases allow."""
        if self.kinds is not None:
            return self.kinds
        return tuple(kind for kind in KINDS if self.tables != 1 or kind not in TWO_TABLE_KINDS)

    @property
    def every_schema(self) -> tuple[str, ...]:
        """The schemas of all splits together."""
        return SCHEMA_NAMES if self.schema_names is None else self.schema_names

    def schemas_of(self, split: str) -> tuple[str, ...]:
        """The schemas that a split draws from: all of them, or with `schemas: disjoint` its own."""
        if self.schemas == "shared":
            return self.every_schema
        # Which schemas are held out never depends on the seed: results of different seeds can be compared.
        names = sorted(self.every_schema, key=lambda name: derive_seed("held-out schemas", name))
        held_out = max(1, len(names) // 6)
        parts = {"test": names[:held_out], "validation": names[held_out : 2 * held_out], "train": names[2 * held_out :]}
        return tuple(parts[split])


class GeneratedTasks(Sequence[Task]):
    """The tasks of a split, made on demand: the same config, split and index give the same task everywhere.

    A task's `prompt` is the question, its `answer` the gold query, its `data` what the database is built from again.
    """

    def __init__(self, config: GeneratorConfig, split: str, indices: range | None = None) -> None:
        self._config = config
        self._split = split
        self._indices = range(TASKS_PER_SPLIT) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> GeneratedTasks: ...
    def __getitem__(self, index: int | slice) -> Task | GeneratedTasks:
        if isinstance(index, slice):
            return GeneratedTasks(self._config, self._split, self._indices[index])
        return draw_task(self._config, self._split, self._indices[index])

    def __iter__(self) -> Iterator[Task]:
        return (draw_task(self._config, self._split, index) for index in self._indices)


def draw_task(config: GeneratorConfig, split: str, index: int) -> Task:
    """One task: a world and a question that has an answer, only one, and one that no wrong decision gives too.

    Raises `UserError` when no question of the chosen kinds can be asked of such databases.
    """
    draw = random.Random(derive_seed("stepgym_sql", config.seed, split, index))
    kind = draw.choice(config.every_kind)
    names = config.schemas_of(split)
    for _ in range(_ATTEMPTS):
        spec = WorldSpec(
            schema=draw.choice(names),
            world=draw.getrandbits(52),
            rows=config.rows,
            tables=config.tables,
            columns=config.columns,
            names=config.names,
            spellings=config.spellings,
            column_types=config.column_types,
        )
        question_seed = draw.getrandbits(52)
        world = World(spec)
        plan = KINDS[kind](world, random.Random(question_seed), config.paraphrase)
        if plan is not None and _is_sound(world, plan):
            data = {**spec.to_dict(), "kind": kind, "question": question_seed, "paraphrase": config.paraphrase}
            return Task(id=f"{split}-{index}", prompt=plan.question, answer=plan.sql(), data=data)
    raise UserError(
        f"sql: no question of the kind {kind!r} can be asked of databases with rows={config.rows}, "
        f"tables={config.tables}, columns={config.columns}; choose other kinds or larger databases"
    )


def is_generated(task: Task) -> bool:
    """Whether a task's database comes from the generator."""
    return "world" in task.data and "schema" in task.data


def rebuild_plan(task: Task) -> Plan:
    """The plan of a generated task, drawn again from its data. Raises `EnvError` for the data of another version."""
    data = task.data
    world = World(WorldSpec.from_dict(data))
    plan: Plan | None = KINDS[data["kind"]](world, random.Random(data["question"]), data["paraphrase"])
    if plan is None or plan.sql() != task.answer:
        raise EnvError(f"task {task.id}: its data no longer gives its question; it was made by another version")
    return plan


def _is_sound(world: World, plan: Plan) -> bool:
    """Whether the question has an answer that is neither empty nor had by deciding anything wrongly."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        world.fill(connection)
        answer: list[Row] = connection.execute(plan.sql()).fetchall()
        if (
            not answer
            or len(answer) > max(_MOST_ANSWER_ROWS, world.spec.rows)
            or all(value in (None, 0) for row in answer for value in row)
        ):
            return False
        names = plan.open_slots
        for wrong in chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1)):
            other: list[Row] = connection.execute(plan.sql(wrong)).fetchall()
            if other == answer or ("ORDER BY" not in plan.template and same_multiset(other, answer)):
                return False
    finally:
        connection.close()
    return True


def _check_names(option: str, given: Sequence[str] | None, known: Sequence[str] | Mapping[str, Any]) -> None:
    if given is None:
        return
    if not given:
        raise UserError(f"sql: {option} must not be empty; known: {', '.join(known)}")
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), list(known), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"sql: unknown name {name!r} in {option}; {hint}Known: {', '.join(known)}")
