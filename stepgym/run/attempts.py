"""Playing a sample: attempt after attempt until one stands, each recorded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium

from stepgym.env.base import Env
from stepgym.env.messages import user
from stepgym.env.task import Task
from stepgym.env.worker import threads
from stepgym.errors import EnvError, StepgymError
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.model.engines.scripted import ScriptedEngine
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.step import Sampling
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.agent import Agent
from stepgym.run.env_source import EnvSource
from stepgym.run.episode import Episode, EpisodeLimits, EpisodeResult, outcome_of
from stepgym.run.session import Session, SessionLimits
from stepgym.run.tally import Tally
from stepgym.seeds import derive_seed

logger = logging.getLogger(__name__)


class RunStoppedError(StepgymError):
    """Too many episodes failed through no fault of the agent's: going on would waste time and data. Exit code 3."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One sample of a task to play, and the number of its first attempt that is not stored yet."""

    task: Task
    sample: int
    first_attempt: int


@dataclass(eq=False)
class Attempts:
    """All that the episodes of one call share.

    Attributes:
        source: Where environments come from.
        engine, renderer, agent, sampling, session_limits, episode_limits: How every episode is played; no engine where
            an `expert` plays.
        policy: What is retried, and when the run stops.
        phase, iteration, seed: Go into ids and seeds.
        store: Where attempts are kept, if anywhere.
        expert: Options for the environment's expert, which then plays instead of a model.
        provenance: Goes into every trajectory.
        tally: Running totals.
        training: Whether too many lost episodes stop the run.
        planned: Samples asked for.
        share_of: Episodes that the policy's `max_dropped_share` is a share of.
    """

    source: EnvSource
    engine: Engine | ChatEngine | None
    renderer: Renderer | None
    agent: Agent
    session_limits: SessionLimits
    episode_limits: EpisodeLimits
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
    share_of: int = 0
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

    async def sample(self, job: SampleJob) -> Trajectory:
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
        if self.training and len(self.lost) > self.policy.max_dropped_share * self.share_of:
            raise RunStoppedError(
                f"{len(self.lost)} of the {self.share_of} episodes of {self.phase} {self.iteration} failed by "
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

    async def _attempt(self, job: SampleJob, attempt: int) -> Trajectory:
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
            limits=self.session_limits,
            seed=seeds["sampler"],
        )
        episode = Episode(env, task, session, limits=self.episode_limits)
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


def _is_unscorable(detail: str) -> bool:
    """Whether an episode ended because its task cannot be scored, by whomever and however often it is played."""
    return detail.startswith("unscorable task")
