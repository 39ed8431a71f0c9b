"""A scripted agent that looks before it answers, and can be told to decide wrongly now and then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from stepgym.env.messages import Message
from stepgym.env.task import Task
from stepgym.errors import UserError
from stepgym_sql.generate.plan import Decision, Plan, Slot
from stepgym_sql.generate.tasks import is_generated, rebuild_plan

if TYPE_CHECKING:
    from stepgym_sql.env import SQLEnv

DECISIONS: tuple[Decision, ...] = get_args(Decision)

_LOOK_AT_SCHEMA = {
    "full": "SELECT name, sql FROM sqlite_master WHERE type = 'table'",
    "brief": "SELECT sql FROM sqlite_master",
}
_THOUGHTS = {
    "full": {
        "schema": "I need to see the tables and their columns first.",
        "values": "I need to see how the values are spelled before I can compare with them.",
        "solve": "Now I can write the query.",
    },
    "brief": {"schema": "tables", "values": "values", "solve": "solve"},
}


def play(
    env: SQLEnv, task: Task, *, mistakes: float = 0.0, decisions: Sequence[Decision] = DECISIONS
) -> Iterator[Message | str]:
    """The turns of an episode: look at the schema, look at the values, solve.

    Args:
        env: The environment that the turns are played in; its `np_random` draws the mistakes.
        task: The task.
        mistakes: Probability that a decision goes wrong. With 0 every episode succeeds.
        decisions: Which decisions may go wrong. `values`: not looking how a value is spelled, and writing it as the
            question does. `column`: taking the first column of the right type that is not the right one. Both are
            wrong for certain: the generator makes no task in which they give the right answer.

    Raises `UserError` for a probability or a decision that is none.
    """
    if not 0.0 <= mistakes <= 1.0:
        raise UserError(f"sql: expert: mistakes must be from 0 to 1, not {mistakes}")
    for decision in decisions:
        if decision not in DECISIONS:
            raise UserError(f"sql: expert: unknown decision {decision!r}; known: {', '.join(DECISIONS)}")
    style = "full" if env.instructions == "full" else "brief"
    thoughts = _THOUGHTS[style]
    # A row of a data set has no plan: its gold query is one slot with nothing to decide.
    fixed = {"gold": Slot(str(task.answer), None, "column")}
    plan = rebuild_plan(task) if is_generated(task) else Plan(task.prompt, "{gold}", fixed)
    wrong: list[str] = []
    looks: list[tuple[str, str]] = []
    for name in plan.open_slots:
        if plan.slots[name].decision in decisions and env.np_random.random() < mistakes:
            wrong.append(name)
    if not env.shows_schema(task):
        looks.append((thoughts["schema"], _LOOK_AT_SCHEMA[style]))
    seen = {slot.look for name, slot in plan.slots.items() if name not in wrong and slot.look is not None}
    looks += [(thoughts["values"], look) for look in plan.looks if look in seen]
    if env.allow_looking:
        for thought, query in looks[: env.max_turns - 1]:
            yield _turn(env, thought, "sql", query)
    yield _turn(env, thoughts["solve"], "solution", plan.sql(wrong))


def _turn(env: SQLEnv, thought: str, name: str, query: str) -> Message | str:
    if env.actions == "tags":
        return f"<think>{thought}</think><{name}>{query}</{name}>"
    call = {"name": name, "arguments": json.dumps({"query": query})}
    return {
        "role": "assistant",
        "content": thought,
        "tool_calls": [{"id": f"call_{env.max_turns - env.turns_left + 1}", "type": "function", "function": call}],
    }
