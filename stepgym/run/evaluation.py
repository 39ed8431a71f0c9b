"""Evaluating an agent, with no training: rollouts and what they say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.env.worker import run_blocking, threads
from stepgym.errors import UserError
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.env_source import EnvSource
from stepgym.run.rollouts import EnvLike, RolloutConfig, rollout_stream
from stepgym.run.statistics import EpisodeScore, Evaluation, summarize
from stepgym.run.tally import Tally


def evaluate(env: EnvLike, engine: Engine | ChatEngine, **options: Any) -> Evaluation:
    """Evaluate an agent in an environment. Arguments as of `evaluate_async`.

    Works in scripts, in notebooks and inside a running event loop.
    """
    return run_blocking(evaluate_async(env, engine, **options))


async def evaluate_async(
    env: EnvLike,
    engine: Engine | ChatEngine,
    *,
    split: str = "test",
    tasks: int | Sequence[Task] = 256,
    config: RolloutConfig | None = None,
    env_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    phase: str = "eval",
    iteration: int = 0,
    policy: OutcomePolicy | None = None,
    tally: Tally | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Play `config.samples` episodes of each task and say how it went, by the rules of `stepgym.run.statistics`.

    Args:
        env: An environment's id, its class, or a function that makes one.
        engine: Where responses come from. It must be open.
        split: Split that tasks are taken from.
        tasks: The tasks, or how many to take from the start of the split.
        config: Samples per task, concurrency, lengths, time limits.
        env_config: Config for an id or a class.
        seed: The run's seed.
        phase, iteration: Go into every `TrajectoryId`.
        policy: What is retried. Its masks do not matter here.
        tally: Running totals to add to.
        on_trajectory: Called with each final trajectory.
        **options: Further arguments of `rollout_stream`, such as `store`, `renderer`, `agent`, `sampling`.

    Raises:
        UserError: As `rollout_stream`; also for a split without tasks.
    """
    source = EnvSource.of(env, **(env_config or {}))
    config = config or RolloutConfig()
    chosen = await split_tasks(source, split, tasks) if isinstance(tasks, int) else tasks
    scores: list[EpisodeScore] = []
    started = time.perf_counter()
    tally = tally if tally is not None else Tally()
    async for trajectory in rollout_stream(
        source,
        chosen,
        engine,
        config=config,
        seed=seed,
        phase=phase,
        iteration=iteration,
        policy=policy,
        tally=tally,
        **options,
    ):
        scores.append(EpisodeScore.of(trajectory))
        if on_trajectory is not None:
            on_trajectory(trajectory)
    result = summarize(
        scores,
        expected=len(chosen) * config.samples,
        wall_s=time.perf_counter() - started,
        seed=seed,
    )
    failed = tally.failed_attempts
    store: TrajectoryStore | None = options.get("store")
    if store is not None:  # it also knows the attempts of the runs that this one goes on with
        played = sorted({score.id.task_id for score in scores})
        rows = store.table(["outcome"], phase=phase, iteration=iteration, final=False, task_id=played)
        failed = Counter(rows.column("outcome").to_pylist())
    return replace(result, failed_attempts=dict(failed.most_common()))


async def split_tasks(source: EnvSource, split: str, count: int | None, *, start: int = 0) -> Sequence[Task]:
    """`count` tasks of a split from position `start` on; None takes all that are left.

    A split that has fewer gives those it has. Raises `UserError` for one that has none there.
    """
    env = source.make()
    try:
        unwrapped: Env = env.unwrapped  # type: ignore[assignment]
        table = await threads.run(unwrapped.tasks, split)
        end = len(table) if count is None else min(len(table), start + count)
        rows = await threads.run(lambda: [table[i] for i in range(start, end)])
    finally:
        await threads.run(env.close)
    if not rows:
        raise UserError(f"environment {source.id}: the split {split!r} has no tasks from position {start} on")
    return [row if isinstance(row, Task) else Task.from_dict(row) for row in rows]
