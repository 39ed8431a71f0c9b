from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stepgym_sql.env import SQLEnv

from stepgym.env.check import check_env
from stepgym.env.shared import close_shared

LOOK = "<think>x</think><sql>SELECT count(*) FROM sqlite_master</sql>"
SMALL: dict[str, Any] = {"workers": 1, "rows": 6, "tables": 1}


def make() -> SQLEnv:
    return SQLEnv(**SMALL)


@pytest.mark.parametrize("actions", ["tags", "tools"])
def test_gymnasium_is_content(actions: Any) -> None:
    check_gymnasium_env(SQLEnv(actions=actions, **SMALL))


@pytest.mark.parametrize("config", [{}, {"actions": "tools", "show_schema": False}, {"schemas": "disjoint"}])
def test_our_own_check_is_content(config: dict[str, Any]) -> None:
    report = check_env(SQLEnv, {**SMALL, **config})
    assert report.ok, [finding for finding in report.findings if finding.level != "ok"]


def test_it_can_be_made_by_its_id() -> None:
    env = gymnasium.make("stepgym:stepgym/sql-v0", **SMALL)
    observation, info = env.reset(seed=3)
    assert observation[0]["role"] == "user"
    assert info["task_id"].startswith("train-")
    assert isinstance(env.unwrapped, SQLEnv)


def test_the_seed_draws_the_task() -> None:
    env = make()
    assert env.reset(seed=5) == env.reset(seed=5) == make().reset(seed=5)
    assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(5)}) == 5


def test_a_wrapper_plays_it() -> None:
    class Halved(gymnasium.RewardWrapper[Any, Any]):
        def reward(self, reward: Any) -> float:
            return float(reward) / 2

    env = Halved(make())
    env.reset(seed=1)
    assert env.get_wrapper_attr("stop") == ("</sql>", "</solution>")
    reward: Any = 0.0
    for turn in env.get_wrapper_attr("expert")(env.get_wrapper_attr("task")):
        _, reward, *_ = env.step(turn)
    assert reward == 0.5


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vector_environments_run_it(kind: str) -> None:
    make().reset(seed=0)  # so that forked children find workers, databases and threads that are not theirs
    vector = SyncVectorEnv([make] * 2) if kind == "sync" else AsyncVectorEnv([make] * 2, shared_memory=False)
    try:
        observations, _ = vector.reset(seed=4)
        assert len(observations) == 2
        observations, rewards, terminated, truncated, _ = vector.step([LOOK, "no action"])
        assert "<observation>count(*)\n       1\n" in observations[0][0]["content"]
        assert "Your previous action is invalid" in observations[1][0]["content"]
        assert list(rewards) == [0.0, 0.0]
        assert not any(terminated)
        assert not any(truncated)
    finally:
        vector.close()


def test_episodes_at_the_same_time_do_not_meet() -> None:
    async def episode(seed: int) -> str:
        env = make()
        await env.areset(seed=seed)
        name = str(env.task.answer).split("FROM ")[1].split()[0]
        observation, *_ = await env.astep(f"<think>x</think><sql>SELECT '{name}', count(*) FROM {name}</sql>")
        assert name in observation[0]["content"]
        assert "Error" not in observation[0]["content"]
        return name

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(episode(seed) for seed in range(40)))

    assert len(set(asyncio.run(all_of_them()))) > 5


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("stepgym-sql-")}


def test_closing_leaves_nothing_behind() -> None:
    close_shared(SQLEnv)
    children, before = psutil.Process().children(recursive=True), folders()
    for config in ({}, {"kinds": ["count"]}):
        env = SQLEnv(**SMALL, **config)
        env.reset(seed=0)
        env.step(LOOK)
        env.close()
    assert len(psutil.Process().children(recursive=True)) == len(children) + 2
    assert len(folders()) == len(before) + 2
    close_shared(SQLEnv)
    assert psutil.Process().children(recursive=True) == children
    assert folders() <= before
    env.reset(seed=0)  # and it can be used again


PROGRAM = """
import json, os, sys, multiprocessing
from stepgym_sql.env import SQLEnv

def play(pipe=None):
    env = SQLEnv(workers=1, rows=6)
    env.reset(seed=0)
    env.step("<think>x</think><sql>SELECT 1</sql>")
    found = (str(env.shared.folder._path), env.shared.pool.processes)
    if pipe is None:
        return found
    pipe.send(found)

if __name__ == "__main__":
    ours = play()
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=play, args=(there,))
    child.start()
    theirs = here.recv()
    child.join()
    print(json.dumps([ours, theirs]))
"""


def test_the_end_of_a_process_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (ours, our_workers), (theirs, their_workers) = json.loads(done.stdout)
    assert ours != theirs
    assert not Path(ours).exists()
    assert not Path(theirs).exists()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in our_workers + their_workers if psutil.pid_exists(p)], 10)
    assert not alive
