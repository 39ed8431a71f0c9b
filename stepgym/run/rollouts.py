"""Many episodes at once: bounded, retried, recorded, resumable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
from pydantic import BaseModel, ConfigDict, Field

from stepgym.env.base import Env
from stepgym.env.messages import user
from stepgym.env.task import Task
from stepgym.env.worker import run_blocking, threads
from stepgym.errors import EnvError, StepgymError, UserError
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.model.engines.scripted import ScriptedEngine
from stepgym.model.open_turn import refuse_for_chat
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.step import Sampling
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.agent import Agent, ChatAgent
from stepgym.run.env_source import EnvSource
from stepgym.run.episode import Episode, EpisodeLimits, EpisodeResult, outcome_of
from stepgym.run.provenance import provenance_of
from stepgym.run.session import Session, SessionLimits
from stepgym.run.tally import Tally
from stepgym.seeds import derive_seed

logger = logging.getLogger(__name__)

EnvLike = EnvSource | str | type[Env] | Callable[[], gymnasium.Env[Any, Any]]


class RunStoppedError(StepgymError):
    """Too many episodes failed through no fault of the agent's: going on would waste time and data. Exit code 3."""

    exit_code = 3


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


@dataclass(frozen=True, slots=True)
class _Job:
    task: Task
    sample: int
    first_attempt: int


@dataclass(eq=False)
class _Rollout:
    """All that the episodes of one call share."""

    source: EnvSource
    engine: Engine | ChatEngine | None
    renderer: Renderer | None
    agent: Agent
    config: RolloutConfig
    sampling: Sampling
    policy: OutcomePolicy
    phase: str
    iteration: int
    seed: int
    store: TrajectoryStore | None
    expert: Mapping[str, Any] | None
    provenance: Mapping[str, Any]
    tally: Tally
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    training: bool = False
    planned: int = 0
    given_up: list[Trajectory] = field(default_factory=list)
    lost: list[Trajectory] = field(default_factory=list)

    async def check(self) -> None:
        """Open what the environments share and show the tools to the template, before anything is paid for."""
        env = self.source.make()
        try:
            await threads.run(lambda: env.unwrapped.shared)  # type: ignore[attr-defined]
            tools = env.get_wrapper_attr("tools")
            if self.renderer is not None and tools:
                self.renderer.prompt([user("")], tools)
        finally:
            await threads.run(env.close)

    async def sample(self, job: _Job) -> Trajectory:
        """Play one sample until an attempt stands; attempts that were retried are stored too."""
        attempt = job.first_attempt
        while True:
            trajectory = await self._attempt(job, attempt)
            if trajectory.final:
                break
            await self._keep(trajectory)
            attempt += 1
        if trajectory.outcome.scored or _is_unscorable(trajectory.outcome_detail):
            await self._keep(trajectory)
        else:
            self.tally.add(trajectory)
            self.given_up.append(trajectory)
            self.count_lost(trajectory)
        if attempt > 0 and not trajectory.outcome.scored:
            said = trajectory.steps[-1].message if trajectory.steps else None
            last = (said or {}).get("text", "") if said else "nothing yet"
            line = (
                f"{trajectory.id}: {trajectory.outcome} again ({trajectory.outcome_detail}); last action: {last!r:.300}"
            )
            self.tally.suspects.append(line)
            logger.warning("suspect: %s", line)
        share = self.tally.infrastructure_share(self.policy)
        if share > self.policy.max_infrastructure_share:
            raise RunStoppedError(
                f"{share:.0%} of the latest attempts failed by infrastructure "
                f"(limit {self.policy.max_infrastructure_share:.0%}); the last: {trajectory.outcome}: "
                f"{trajectory.outcome_detail}"
            )
        return trajectory

    def count_lost(self, trajectory: Trajectory) -> None:
        """Count an episode if training loses it; `RunStoppedError` where these are more than the policy allows."""
        if not self.policy.loses(trajectory.outcome) or _is_unscorable(trajectory.outcome_detail):
            return
        self.lost.append(trajectory)
        if self.training and len(self.lost) > self.policy.max_dropped_share * self.planned:
            raise RunStoppedError(
                f"{len(self.lost)} of the {self.planned} episodes of {self.phase} {self.iteration} failed by "
                f"environment or infrastructure, after all retries, and more than "
                f"{self.policy.max_dropped_share:.0%} may not; the last: {trajectory.outcome}: "
                f"{trajectory.outcome_detail}"
            )

    async def settle(self, *, final: bool) -> None:
        """Store the samples that were given up: they stand, or, where the run was broken off, are tried again later."""
        for trajectory in self.given_up:
            await self._store(trajectory if final else replace(trajectory, final=False))

    async def _keep(self, trajectory: Trajectory) -> None:
        self.tally.add(trajectory)
        await self._store(trajectory)

    async def _store(self, trajectory: Trajectory) -> None:
        if self.store is not None:
            async with self.writing:
                await threads.run(self.store.append, trajectory)

    async def _attempt(self, job: _Job, attempt: int) -> Trajectory:
        task, started = job.task, time.time()
        key = (self.seed, self.phase, self.iteration, task.id)
        seeds = {"env": derive_seed(*key, "env"), "sampler": derive_seed(*key, "sampler", job.sample, attempt)}
        env, steps, result = await self._play(task, seeds)
        retries = self.policy[result.outcome].retries
        metrics = {
            **result.metrics,
            "steps": float(len(steps)),
            "prompt_tokens": float(
                sum(s.metrics.get("prompt_tokens", 0) if s.prompt_ids is None else len(s.prompt_ids) for s in steps)
            ),
            "response_tokens": float(
                sum(
                    s.metrics.get("response_tokens", 0) if s.response_ids is None else len(s.response_ids)
                    for s in steps
                )
            ),
        }
        return Trajectory(
            id=TrajectoryId(self.phase, self.iteration, task.id, job.sample, attempt),
            outcome=result.outcome,
            outcome_detail=result.detail,
            final=_is_unscorable(result.detail) or attempt >= retries,
            steps=tuple(steps),
            reward=result.reward,
            reward_parts=result.reward_parts,
            success=result.success,
            task=task.to_dict(),
            tools=tuple(env.get_wrapper_attr("tools")) if env is not None else (),
            env_id=self.source.id,
            env_config=env.unwrapped.config if isinstance(env and env.unwrapped, Env) else dict(self.source.config),  # type: ignore[union-attr]
            reward_range=tuple(env.get_wrapper_attr("reward_range")) if env is not None else (0.0, 1.0),
            seeds=seeds,
            error=result.error,
            metrics=metrics,
            provenance=self.provenance,
            started_at=started,
        )

    async def _play(
        self, task: Task, seeds: Mapping[str, int]
    ) -> tuple[gymnasium.Env[Any, Any] | None, list[Any], EpisodeResult]:
        try:
            env = self.source.make()
        except (Exception, SystemExit) as error:
            failure = EnvError(f"making the environment failed: {type(error).__name__}: {error}")
            return None, [], EpisodeResult(outcome_of(failure), str(failure))
        engine = self.engine if self.expert is None else self._scripted(env, task, lambda: episode)
        assert engine is not None
        session = Session(
            engine.for_episode(),
            self.renderer,
            sampling=self.sampling,
            limits=self.config.session_limits,
            seed=seeds["sampler"],
        )
        episode = Episode(env, task, session, limits=self.config.episode_limits)
        result = await episode.play(self.agent, seed=seeds["env"])
        return env, session.steps, result

    def _scripted(self, env: gymnasium.Env[Any, Any], task: Task, episode: Callable[[], Episode]) -> ScriptedEngine:
        """An engine that says what the environment's expert would say, through the same session as a model."""
        renderer = self.renderer
        assert renderer is not None

        def encode(message: Mapping[str, Any] | str) -> Any:
            played = episode()
            return renderer.encode_response(
                played.messages, message, tools=played.tools, stop=played.stop, prompt=played.session.prompt
            )

        script = env.get_wrapper_attr("expert")(task, **(self.expert or {}))
        return ScriptedEngine(script, encode=encode, tokenizer=renderer.tokenizer)


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
    run = _Rollout(
        source=EnvSource.of(env, **(env_config or {})),
        engine=engine,
        renderer=renderer,
        agent=agent or ChatAgent(),
        config=config or RolloutConfig(),
        sampling=sampling or Sampling(),
        policy=policy or OutcomePolicy(),
        phase=phase,
        iteration=iteration,
        seed=seed,
        store=store,
        expert=expert,
        provenance={
            **provenance_of(engine, renderer, agent or ChatAgent(), (config or RolloutConfig()).session_limits),
            **(provenance or {}),
        },
        tally=tally if tally is not None else Tally(),
        training=training,
        planned=len(tasks) * (config or RolloutConfig()).samples,
    )
    await run.check()
    run.tally.planned += run.planned
    finished, tried = _stored(store, phase, iteration)
    jobs: list[_Job] = []
    seen: set[str] = set()
    for position in range(len(tasks)):
        task = tasks[position] if isinstance(tasks[position], Task) else Task.from_dict(tasks[position])  # type: ignore[arg-type]
        if task.id in seen:
            raise UserError(f"two of the tasks have the id {task.id!r}; a trajectory is found by its task's id")
        seen.add(task.id)
        for sample in range(run.config.samples):
            known = finished.get((task.id, sample))
            if known is not None and store is not None:
                trajectory = await threads.run(store.load, known)
                run.tally.add(trajectory, resumed=True)
                run.count_lost(trajectory)
                yield trajectory
            else:
                jobs.append(_Job(task, sample, tried.get((task.id, sample), 0)))
    whole = False
    try:
        async for trajectory in _in_parallel(run, jobs):
            yield trajectory
        whole = True
    finally:
        await run.settle(final=whole)
        if store is not None:
            await threads.run(store.flush)


def _is_unscorable(detail: str) -> bool:
    """Whether an episode ended because its task cannot be scored, by whomever and however often it is played."""
    return detail.startswith("unscorable task")


async def _in_parallel(run: _Rollout, jobs: Sequence[_Job]) -> AsyncIterator[Trajectory]:
    """Play jobs, `concurrency` at a time, in order of start; yield in order of end."""
    waiting = iter(jobs)
    done: asyncio.Queue[Trajectory | BaseException | None] = asyncio.Queue()

    async def work() -> None:
        try:
            for job in waiting:
                done.put_nowait(await run.sample(job))
        except BaseException as error:
            done.put_nowait(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            done.put_nowait(None)

    workers = [asyncio.create_task(work()) for _ in range(min(run.config.concurrency, len(jobs)))]
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
