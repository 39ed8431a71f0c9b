from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from stepgym_search.encyclopedia import KINDS
from stepgym_search.env import SearchEnv

from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.errors import UserError

SMALL: dict[str, Any] = {"articles": 1000, "topk": 5}
TINY: dict[str, Any] = {
    **SMALL,
    "instructions": "none",
    "observation_format": "brief",
    "kinds": ["two_hop"],
    "wording": "plain",
    "names": "short",
    "aliases": False,
    "gaps": False,
}


@pytest.fixture(scope="module", autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SearchEnv)


def play(config: dict[str, Any], task: Task, seed: int = 0, **options: Any) -> tuple[float, list[Any], dict[str, Any]]:
    env = SearchEnv(**config)
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
@pytest.mark.parametrize("observation_format", ["search-r1", "skyrl", "brief"])
def test_the_expert_always_succeeds(actions: str, observation_format: str) -> None:
    config = {**SMALL, "actions": actions, "observation_format": observation_format}
    kinds = Counter[str]()
    for task in SearchEnv(**config).tasks("test")[:120]:
        total, turns, info = play(config, task)
        assert total == 1.0, (task, turns, info)
        assert info["success"]
        assert len(turns) == len(task.data["plan"]["searches"]) + 1
        kinds[task.data["kind"]] += 1
    assert set(kinds) == set(KINDS)


def test_its_queries_find_what_proves_the_answer() -> None:
    tasks = SearchEnv(**SMALL).tasks("validation")[:150]
    found = [play(SMALL, task)[2]["metrics"]["gold_retrieved"] for task in tasks]
    assert sum(found) / len(found) > 0.97


def thoughts(turns: list[str]) -> list[str]:
    return [turn.removeprefix("<think>").partition("</think>")[0] for turn in turns]


def test_a_small_model_sees_few_words_that_say_what_is_taken() -> None:
    for task in SearchEnv(**TINY).tasks("train")[:40]:
        total, turns, _ = play(TINY, task)
        assert total == 1.0
        assert len(task.data["plan"]["takes"]) == 2
        assert thoughts(turns) == ["search", *(name.replace("_", " ") for name in task.data["plan"]["takes"])]
        _, turns, _ = play({**TINY, "allow_search": False}, task)
        assert thoughts(turns) == [task.data["plan"]["takes"][-1].replace("_", " ")]


def test_a_mistake_says_what_it_takes() -> None:
    for decision in ("stop", "field"):
        tasks = [task for task in SearchEnv(**TINY).tasks("train")[:40] if decision in task.data["plan"]["slips"]]
        for task in tasks:
            plan = task.data["plan"]
            slip = plan["slips"][decision]
            _, turns, _ = play(TINY, task, mistakes=1.0, decisions=(decision,))
            wrong = [*plan["takes"][: slip["searches"] - 1], slip["takes"]]
            assert thoughts(turns) == ["search", *(name.replace("_", " ") for name in wrong)]
            assert wrong != plan["takes"]
            assert f"<answer>{slip['answer']}</answer>" in turns[-1]


def test_mistakes_are_decisions_and_always_wrong() -> None:
    tasks = SearchEnv(**TINY).tasks("train")
    always = [play(TINY, task, seed, mistakes=1.0) for seed, task in enumerate(tasks[:60])]
    assert all(total == 0.0 for total, _, _ in always)
    assert {len(turns) for _, turns, _ in always} == {2, 3}  # stopped early, or took the wrong fact
    half = [play(TINY, task, seed, mistakes=0.5) for seed, task in enumerate(tasks[:150])]
    assert 0.35 < sum(total for total, _, _ in half) / len(half) < 0.65
    for decision, length in (("stop", 2), ("field", 3)):
        able = [task for task in tasks[:60] if decision in task.data["plan"]["slips"]]
        assert len(able) > 20
        only = [play(TINY, task, seed, mistakes=1.0, decisions=(decision,)) for seed, task in enumerate(able)]
        assert all(total == 0.0 and len(turns) == length for total, turns, _ in only)
    none = [play(TINY, task, seed, mistakes=1.0, decisions=()) for seed, task in enumerate(tasks[:5])]
    assert all(total == 1.0 for total, _, _ in none)


def test_mistakes_come_from_the_seed() -> None:
    task = SearchEnv(**TINY).tasks("train")[3]
    same = [play(TINY, task, seed=7, mistakes=0.5)[1] for _ in range(3)]
    assert same[0] == same[1] == same[2]
    assert len({tuple(play(TINY, task, seed=seed, mistakes=0.5)[1]) for seed in range(12)}) > 1


def test_the_expert_keeps_to_what_is_allowed() -> None:
    task = SearchEnv(**TINY).tasks("train")[0]
    assert len(play({**TINY, "allow_search": False}, task)[1]) == 1
    total, turns, _ = play({**TINY, "max_turns": 2}, task)
    assert (total, len(turns)) == (1.0, 2)
    assert len(play({**TINY, "max_turns": 2, "final_turn": True}, task)[1]) == 3
    assert play({**TINY, "max_turns": 1}, task)[0] == 1.0


@pytest.mark.parametrize("options", [{"mistakes": 2}, {"decisions": ["guess"]}, {"errors": 1}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    env = SearchEnv(**TINY)
    env.reset(seed=0)
    with pytest.raises(UserError, match="expert"):
        env.expert(env.task, **options)
