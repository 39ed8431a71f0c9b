"""A scripted agent that plays the plan of a generated question, and can be told to decide wrongly now and then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from stepgym.env.messages import Message
from stepgym.env.task import Task
from stepgym.errors import UserError

if TYPE_CHECKING:
    from stepgym_search.env import SearchEnv

Decision: TypeAlias = Literal["stop", "field"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)

_THOUGHTS = {
    "full": {
        "first": "I do not know this, so I search for it.",
        "next": "From what I found I take the {takes}, and search on.",
        "answer": "From what I found I take the {takes}, and can answer.",
        "guess": "I cannot search, so I guess the {takes}.",
    },
    "brief": {"first": "search", "next": "{takes}", "answer": "{takes}", "guess": "{takes}"},
}


def play(
    env: SearchEnv, task: Task, *, mistakes: float = 0.0, decisions: Sequence[Decision] = DECISIONS
) -> Iterator[Message | str]:
    """The turns of an episode: the searches of the task's plan, then the answer.

    Args:
        env: The environment that the turns are played in; its `np_random` draws the mistakes.
        task: A generated task.
        mistakes: Probability that the episode goes wrong. With 0 every episode succeeds.
        decisions: What may go wrong. `stop`: to answer with what an earlier article says. `field`: to take another fact
            of the same kind from the last article. Each is wrong for certain; a task that has neither is played
            right.

    Raises `UserError` for a probability or a decision that is none, and for a task without a plan.
    """
    if not 0.0 <= mistakes <= 1.0:
        raise UserError(f"search: expert: mistakes must be from 0 to 1, not {mistakes}")
    for decision in decisions:
        if decision not in DECISIONS:
            raise UserError(f"search: expert: unknown decision {decision!r}; known: {', '.join(DECISIONS)}")
    if "plan" not in task.data:
        raise UserError(f"search: task {task.id!r} has no expert: only generated questions have a plan")
    return _turns(env, task, mistakes, decisions)


def _turns(env: SearchEnv, task: Task, mistakes: float, decisions: Sequence[Decision]) -> Iterator[Message | str]:
    plan = task.data["plan"]
    searches, takes, answer = list(plan["searches"]), list(plan["takes"]), str(plan["answer"])
    possible = [name for name in DECISIONS if name in decisions and name in plan["slips"]]
    # Drawn whether or not there is something to do wrong, so that the draws of one episode do not move others.
    slips, which = env.np_random.random(2)
    if possible and slips < mistakes:
        slip = plan["slips"][possible[int(which * len(possible))]]
        searches, answer = searches[: slip["searches"]], str(slip["answer"])
        takes = [*takes[: len(searches) - 1], slip["takes"]]
    thoughts = _THOUGHTS["full" if env.instructions == "search-r1" else "brief"]
    if env.allow_search:
        for number, query in enumerate(searches[: env.max_turns - 1]):
            yield _search(env, _thought(thoughts["next"], takes[number - 1]) if number else thoughts["first"], query)
    thought = _thought(thoughts["answer" if env.allow_search else "guess"], takes[-1])
    if env.actions == "tags":
        yield f"<think>{thought}</think><answer>{answer}</answer>"
    else:
        yield f"{thought}\n<answer>{answer}</answer>"


def _thought(words: str, relation: str) -> str:
    return words.replace("{takes}", relation.replace("_", " "))


def _search(env: SearchEnv, thought: str, query: str) -> Message | str:
    if env.actions == "tags":
        return f"<think>{thought}</think><search>{query}</search>"
    call = {"name": "search", "arguments": json.dumps({"query": query}, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": thought,
        "tool_calls": [{"id": f"call_{env.max_turns - env.turns_left + 1}", "type": "function", "function": call}],
    }
