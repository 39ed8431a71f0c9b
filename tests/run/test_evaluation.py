"""Evaluation plays a split, keeps to the rules of what counts, and needs no training and no store."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.errors import EngineError, UnscorableTask, UserError
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.store import TrajectoryStore
from stepgym.run.env_source import EnvSource
from stepgym.run.evaluation import evaluate, evaluate_async, split_tasks
from stepgym.run.rollouts import RolloutConfig
from stepgym.run.tally import Tally


def test_the_first_tasks_of_the_split_are_played(count_env: Any, parrot: Any, counts: Any) -> None:
    seen, tally = Counter[str](), Tally()
    found = evaluate(
        count_env,
        parrot(counts),
        split="validation",
        tasks=5,
        env_config={"goal": 2},
        config=RolloutConfig(samples=3),
        tally=tally,
        on_trajectory=lambda t: seen.update([t.id.task_id]),
    )
    assert seen == {f"validation-{n}": 3 for n in range(5)}
    assert (found.tasks, found.episodes, found.missing, found.incomplete) == (5, 15, 0, False)
    assert found.mean_reward == pytest.approx(0.5)
    assert found.success == 0.0  # two of three numbers are not enough for this environment
    assert set(found.pass_at) == {1, 2, 3}
    assert tally.episodes == 15
    assert found.wall_s > 0


def test_tasks_of_ones_own_inside_a_running_loop(count_env: Any, parrot: Any, counts: Any) -> None:
    tasks = [Task(id="x", prompt="Count."), Task(id="y", prompt="Count.")]

    async def notebook() -> Any:
        waited = await evaluate_async(count_env, parrot(counts), tasks=tasks)
        blocking = evaluate(count_env, parrot(counts), tasks=tasks)
        return waited, blocking

    for found in asyncio.run(notebook()):
        assert (found.tasks, found.success) == (2, 1.0)


def test_agent_faults_count_and_other_faults_do_not(count_env: Any, parrot: Any) -> None:
    class Mixed(count_env):  # type: ignore[misc]
        def begin(self, task: Task) -> Any:
            number = int(task.id.rpartition("-")[2])
            if number == 0:
                raise UnscorableTask("the gold answer is empty")
            if number == 1:
                raise RuntimeError("the disk is gone")
            super().begin(task)
            return [{"role": "user", "content": f"{'right' if number < 6 else 'wrong'} {number}"}]

    def say(prompt: str, seed: int) -> str:
        if "right 2" in prompt:
            raise EngineError("overloaded")
        return f"<say>{prompt.count('assistant')}</say>" if "right" in prompt else "no idea"

    found = evaluate(Mixed, parrot(say), tasks=10, policy=OutcomePolicy(max_infrastructure_share=1.0))
    assert found.outcomes == {"turn_limit": 4, "completed": 3, "env_error": 2, "engine_error": 1}
    assert found.excluded == {"unscorable": 1, "env_error": 1, "engine_error": 1}
    assert found.unscorable_tasks == ("test-0",)
    assert (found.episodes, found.success) == (7, pytest.approx(3 / 7))
    assert found.failed_attempts == {"env_error": 2, "engine_error": 2}
    assert found.incomplete


def test_a_store_makes_it_resumable(count_env: Any, parrot: Any, counts: Any, tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, "a") as store:
        first = evaluate(count_env, parrot(counts), tasks=3, store=store)
        engine = parrot(counts)
        second = evaluate(count_env, engine, tasks=4, store=store)
    assert len(engine.log) == 3  # three turns of the one new task
    assert (first.tasks, second.tasks, second.success) == (3, 4, 1.0)
    assert {t.id.phase for t in TrajectoryStore(tmp_path)} == {"eval"}


def test_attempts_that_failed_are_counted_also_after_resuming(parrot: Any, tmp_path: Path) -> None:
    class Flaky(Env):
        seen: ClassVar[Counter[str]] = Counter()

        def tasks(self, split: str) -> Any:
            return [Task(id=f"{n}/%", prompt="") for n in range(3)]

        def act(self, message: Any) -> Any:
            self.seen[self.task.id] += 1
            if self.seen[self.task.id] == 1:
                raise RuntimeError("once")
            return "", 1.0, True, False, {}

    with TrajectoryStore(tmp_path, "a") as store:
        found = [evaluate(Flaky, parrot(lambda p, s: "x"), tasks=3, store=store) for _ in range(2)]
    assert [result.failed_attempts for result in found] == [{"env_error": 3}] * 2
    assert found[0].success == found[1].success == 1.0


def test_split_tasks(count_env: type[Env]) -> None:
    class Rows(count_env):  # type: ignore[misc,valid-type]
        closed = 0

        def tasks(self, split: str) -> Any:
            if split == "none":
                return []
            return [{"id": f"{split}-{n}", "prompt": "", "answer": n, "data": {}} for n in range(4)]

        def close(self) -> None:
            Rows.closed += 1

    def ids(split: str, count: int | None, start: int = 0) -> list[Any]:
        return [task.answer for task in asyncio.run(split_tasks(EnvSource.of(Rows), split, count, start=start))]

    assert ids("test", 2) == [0, 1]
    assert ids("test", 9) == ids("test", None) == [0, 1, 2, 3]
    assert ids("test", 2, start=3) == [3]
    with pytest.raises(UserError, match="the split 'none' has no tasks"):
        ids("none", 1)
    with pytest.raises(UserError, match="no tasks from position 4"):
        ids("test", 1, start=4)
    assert Rows.closed == 6
