from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stepgym_search.env import SearchEnv

from stepgym.env.check import check_env
from stepgym.env.shared import close_shared
from stepgym.env.task import Task

SMALL: dict[str, Any] = {"articles": 400}


@pytest.fixture(scope="module", autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SearchEnv)


def make() -> SearchEnv:
    return SearchEnv(**SMALL)


@pytest.mark.parametrize("actions", ["tags", "tools"])
def test_gymnasium_is_content(actions: Any) -> None:
    check_gymnasium_env(SearchEnv(actions=actions, **SMALL))


@pytest.mark.parametrize("config", [{}, {"actions": "tools", "final_turn": True}, {"allow_search": False}])
def test_our_own_check_is_content(config: dict[str, Any]) -> None:
    report = check_env(SearchEnv, {**SMALL, **config})
    assert report.ok, [finding for finding in report.findings if finding.level != "ok"]


def test_it_can_be_made_by_its_id() -> None:
    env = gymnasium.make("stepgym:stepgym/search-v0", **SMALL)
    observation, info = env.reset(seed=3)
    assert observation[0]["content"].startswith("Answer the given question.")
    assert info["task_id"]
    assert isinstance(env.unwrapped, SearchEnv)


def test_the_seed_draws_the_task() -> None:
    env = make()
    assert env.reset(seed=5) == env.reset(seed=5) == make().reset(seed=5)
    assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(5)}) > 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vector_environments_run_it(kind: str) -> None:
    make().reset(seed=0)  # so that forked children find an index and threads that are not theirs
    vector = SyncVectorEnv([make] * 2) if kind == "sync" else AsyncVectorEnv([make] * 2, shared_memory=False)
    try:
        observations, _ = vector.reset(seed=4)
        assert len(observations) == 2
        observations, rewards, terminated, truncated, _ = vector.step(["<search>was born in</search>", "no action"])
        assert "<information>" in observations[0][0]["content"]
        assert "My previous action is invalid" in observations[1][0]["content"]
        assert list(rewards) == [0.0, 0.0]
        assert not any(terminated)
        assert not any(truncated)
    finally:
        vector.close()


def test_episodes_at_the_same_time_share_searches_and_do_not_meet() -> None:
    tasks = make().tasks("train")[:200]

    async def episode(task: Task) -> bool:
        env = make()
        await env.areset(seed=0, options={"task": task})
        *_, info = await env.astep(f"<search>{task.data['plan']['searches'][0]}</search>")
        return bool(info["metrics"]["gold_retrieved"] > 0)

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(episode(task) for task in tasks))

    close_shared(SearchEnv)
    found = asyncio.run(all_of_them())
    assert sum(found) > 0.95 * len(tasks)  # each was given what it asked for itself
    search = make().shared._search
    assert 0 < search.queries <= len(tasks)
    assert search.searches <= len(tasks) / 2


def test_a_slow_search_does_not_hold_up_the_loop() -> None:
    """Beside a search that takes a while, others on the same event loop go on."""
    env = make()
    env.reset(seed=0)
    retriever = env.shared._search.retriever
    plain = retriever.search

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return plain(*arguments)

    async def both() -> list[str]:
        order: list[str] = []

        async def search() -> None:
            await env.astep("<search>was born in</search>")
            order.append("search")

        async def other() -> None:
            await asyncio.sleep(0.01)
            order.append("other")

        await asyncio.gather(search(), other())
        return order

    retriever.search = slow
    try:
        assert asyncio.run(both()) == ["other", "search"]
    finally:
        del retriever.search


def test_closing_and_using_it_again() -> None:
    env = make()
    env.reset(seed=0)
    env.step("<search>was born in</search>")
    close_shared(SearchEnv)
    env.reset(seed=0)
    assert "Doc 1(" in env.step("<search>was born in</search>")[0][0]["content"]


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "bm25s", "faiss", "pyserini", "fastapi", "sentence_transformers", "datasets"]
    program = f"import sys, stepgym_search.env; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_what_a_config_means_is_found_out_once() -> None:
    """So that an environment, which is made for every episode, costs next to nothing."""
    from stepgym_search import env as module

    make()
    before = module._checked_encyclopedia.cache_info().misses, module._check_retriever.cache_info().misses
    for _ in range(10):
        make()
    assert (module._checked_encyclopedia.cache_info().misses, module._check_retriever.cache_info().misses) == before
