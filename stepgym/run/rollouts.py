"""Many episodes at once: bounded, retried, recorded, resumable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import gymnasium
from pydantic import BaseModel, ConfigDict, Field

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.env.worker import run_blocking, threads
from stepgym.errors import UserError
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.model.open_turn import refuse_for_chat
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.step import Sampling
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.agent import Agent, ChatAgent
from stepgym.run.attempts import Attempts, RunStoppedError, SampleJob
from stepgym.run.env_source import EnvSource
from stepgym.run.episode import EpisodeLimits
from stepgym.run.places import Places
from stepgym.run.provenance import provenance_of
from stepgym.run.session import SessionLimits
from stepgym.run.tally import Tally

EnvLike = EnvSource | str | type[Env] | Callable[[], gymnasium.Env[Any, Any]]

__all__ = ["EnvLike", "RolloutConfig", "RunStoppedError", "collect", "rollout", "rollout_stream"]


class RolloutConfig(BaseModel):
    """How episodes are played.

    Attributes:
        samples: Rollouts per task.
        concurrency: Episodes at once.
        max_prompt_tokens: Longest prompt that is ever sent; null leaves it to the engine's context.
        max_response_tokens: Most tokens of one response.
        engine_timeout: Seconds for one response.
        step_timeout: Seconds for one call of the environment.
        episode_timeout: Seconds for a whole episode.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(default=1, ge=1)
    concurrency: int = Field(default=64, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_response_tokens: int = Field(default=1024, ge=1)
    engine_timeout: float | None = Field(default=600.0, gt=0)
    step_timeout: float | None = Field(default=120.0, gt=0)
    episode_timeout: float | None = Field(default=1800.0, gt=0)

    @property
    def session_limits(self) -> SessionLimits:
        """The part that sessions take."""
        return SessionLimits(self.max_prompt_tokens, self.max_response_tokens, self.engine_timeout)

    @property
    def episode_limits(self) -> EpisodeLimits:
        """The part that episodes take."""
        return EpisodeLimits(self.step_timeout, self.episode_timeout)


async def rollout_stream(
    env: EnvLike,
    tasks: Sequence[Task],
    engine: Engine | ChatEngine | None = None,
    *,
    env_config: Mapping[str, Any] | None = None,
    renderer: Renderer | None = None,
    agent: Agent | None = None,
    config: RolloutConfig | None = None,
    sampling: Sampling | None = None,
    policy: OutcomePolicy | None = None,
    phase: str = "rollout",
    iteration: int = 0,
    seed: int = 0,
    store: TrajectoryStore | None = None,
    expert: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    tally: Tally | None = None,
    training: bool = False,
    share_of: int | None = None,
    samples: Mapping[str, Sequence[int]] | None = None,
    places: Places | None = None,
    rank: int = 0,
) -> AsyncIterator[Trajectory]:
    """Play `config.samples` episodes of every task and yield each final trajectory as it ends.

    Args:
        env: An environment's id, its class, or a function that makes one (a wrapped one, say).
        tasks: What to play; anything with a length and items, or a `datasets.Dataset` of rows.
        engine: Where responses come from. It must be open. None with `expert`.
        env_config: Config for an id or a class.
        renderer: The model's renderer; None makes one from the engine's tokenizer.
        agent: Who plays; None: `ChatAgent`.
        config: Samples, concurrency, lengths, time limits.
        sampling: How to sample; None: temperature 1, untruncated.
        policy: What is retried, and when the run stops.
        phase, iteration: Go into every `TrajectoryId`.
        seed: The run's seed. Environments of a group share theirs; samplers differ by sample, attempt and turn.
        store: Where trajectories are kept. Those that it holds already are yielded from it, not played again. A sample
            that failed by environment or infrastructure is final only when all of them have ended: a run that was
            broken off tries it again.
        expert: Options for the environment's `expert`, which then plays instead of a model, through the same recorder.
        provenance: Goes into every trajectory, over model, template and versions.
        tally: Running totals to add to.
        training: Whether they are for training, which stops when more than `policy.max_dropped_share` of the episodes
            failed by environment or infrastructure.
        share_of: How many episodes that is a share of, where these are only some of them; None: of these.
        samples: Indices of the samples to play, by task id; None: 0, 1, ... up to `config.samples`, of every task.
        places: A bound on episodes at once that other rollouts share; within it `config.concurrency` holds too.
        rank: Who is served first where rollouts share places: the lowest.

    Raises:
        UserError: The environment, its config or the model's template cannot work, the engine cannot do what the
            renderer is set to, or two tasks have one id.
        RunStoppedError: Too large a share of attempts failed by infrastructure, or (`training`) of episodes.
    """
    if engine is None and expert is None:
        raise ValueError("rollout needs an engine, or the options of an expert")
    if renderer is None and isinstance(engine, Engine):
        renderer = Renderer(engine.tokenizer)
    if renderer is not None and isinstance(engine, ChatEngine):
        refuse_for_chat(renderer.turns, renderer.history)
    config, agent = config or RolloutConfig(), agent or ChatAgent()
    wanted = _wanted(tasks, range(config.samples), samples)
    planned = sum(len(numbers) for _, numbers in wanted)
    run = Attempts(
        source=EnvSource.of(env, **(env_config or {})),
        engine=engine,
        renderer=renderer,
        agent=agent,
        session_limits=config.session_limits,
        episode_limits=config.episode_limits,
        sampling=sampling or Sampling(),
        policy=policy or OutcomePolicy(),
        phase=phase,
        iteration=iteration,
        seed=seed,
        store=store,
        expert=expert,
        provenance={
            **provenance_of(engine, renderer, agent, config.session_limits),
            **(provenance or {}),
        },
        tally=tally if tally is not None else Tally(),
        training=training,
        planned=planned,
        share_of=planned if share_of is None else share_of,
    )
    await run.check()
    run.tally.planned += run.planned
    finished, tried = _stored(store, phase, iteration)
    jobs: list[SampleJob] = []
    for task, numbers in wanted:
        for sample in numbers:
            known = finished.get((task.id, sample))
            if known is not None and store is not None:
                trajectory = await threads.run(store.load, known)
                run.tally.add(trajectory, resumed=True)
                run.count_lost(trajectory)
                yield trajectory
            else:
                jobs.append(SampleJob(task, sample, tried.get((task.id, sample), 0)))
    whole = False
    try:
        async for trajectory in _in_parallel(run, jobs, config.concurrency, places or Places(config.concurrency), rank):
            yield trajectory
        whole = True
    finally:
        await run.settle(final=whole)
        if store is not None:
            await threads.run(store.flush)


def _wanted(
    tasks: Sequence[Any], every: Sequence[int], samples: Mapping[str, Sequence[int]] | None
) -> list[tuple[Task, Sequence[int]]]:
    """The tasks, each with the indices of its samples. Raises `UserError` for two tasks of one id."""
    wanted: list[tuple[Task, Sequence[int]]] = []
    seen: set[str] = set()
    for position in range(len(tasks)):
        row = tasks[position]
        task = row if isinstance(row, Task) else Task.from_dict(row)
        if task.id in seen:
            raise UserError(f"two of the tasks have the id {task.id!r}; a trajectory is found by its task's id")
        seen.add(task.id)
        wanted.append((task, every if samples is None else samples[task.id]))
    return wanted


async def _in_parallel(
    run: Attempts, jobs: Sequence[SampleJob], workers_wanted: int, places: Places, rank: int
) -> AsyncIterator[Trajectory]:
    """Play jobs, so many at a time, in order of start; yield in order of end."""
    waiting = iter(jobs)
    done: asyncio.Queue[Trajectory | BaseException | None] = asyncio.Queue()

    async def work() -> None:
        try:
            for job in waiting:
                async with places.take(rank):
                    done.put_nowait(await run.sample(job))
        except BaseException as error:
            done.put_nowait(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            done.put_nowait(None)

    workers = [asyncio.create_task(work()) for _ in range(min(workers_wanted, len(jobs)))]
    try:
        running = len(workers)
        while running:
            item = await done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def rollout(
    env: EnvLike, tasks: Sequence[Task], engine: Engine | ChatEngine | None = None, **options: Any
) -> list[Trajectory]:
    """Play episodes and return the final trajectories, by task and sample. Arguments as of `rollout_stream`.

    Works in scripts, in notebooks and inside a running event loop.
    """
    return run_blocking(collect(env, tasks, engine, **options))


async def collect(
    env: EnvLike,
    tasks: Sequence[Task],
    engine: Engine | ChatEngine | None = None,
    *,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    **options: Any,
) -> list[Trajectory]:
    """`rollout`, for those who await. `on_trajectory` is called with each trajectory as it ends."""
    found = []
    async for trajectory in rollout_stream(env, tasks, engine, **options):
        found.append(trajectory)
        if on_trajectory is not None:
            on_trajectory(trajectory)
    order = {str(_task_id(tasks[i])): i for i in range(len(tasks))}
    return sorted(found, key=lambda t: (order[t.id.task_id], t.id.sample))


def _task_id(row: Any) -> Any:
    return row.id if isinstance(row, Task) else row["id"]


def _stored(
    store: TrajectoryStore | None, phase: str, iteration: int
) -> tuple[dict[tuple[str, int], TrajectoryId], dict[tuple[str, int], int]]:
    """Final trajectories in the store, and the number of attempts made so far, by task and sample."""
    finished: dict[tuple[str, int], TrajectoryId] = {}
    tried: dict[tuple[str, int], int] = {}
    if store is None:
        return finished, tried
    final = set(store.ids(final_only=True))
    for known in store.ids():
        if (known.phase, known.iteration) != (phase, iteration):
            continue
        key = (known.task_id, known.sample)
        tried[key] = max(tried.get(key, 0), known.attempt + 1)
        if known in final:
            finished[key] = known
    return finished, tried
