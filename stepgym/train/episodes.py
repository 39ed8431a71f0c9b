"""The episodes of a training run: the expert's, those that are learned from, and those that measure."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stepgym.env.task import Task
from stepgym.env.worker import run_blocking, threads
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.agent import Agent
from stepgym.run.env_source import EnvSource
from stepgym.run.evaluation import evaluate_async, split_tasks
from stepgym.run.places import Places
from stepgym.run.rollouts import collect
from stepgym.run.statistics import Evaluation
from stepgym.run.tally import Tally
from stepgym.train.config import LearnerConfig
from stepgym.train.lots import Lot
from stepgym.train.observer import Observer
from stepgym.train.overlap import staleness, staleness_metrics
from stepgym.train.recipe import Recipe
from stepgym.train.refill import without_signal
from stepgym.train.sync import WeightSync
from stepgym.train.training_tasks import TrainingTasks

_FIRST = -1
"""Rank of episodes that somebody waits for: before every lot."""


class Episodes:
    """Plays the episodes of a run and keeps them. Where several processes train, rank 0 has one.

    Args:
        recipe: How they are played.
        algorithm: Decides which groups have a signal.
        source, agent, renderer: Environments, who plays them, and how messages become prompts.
        tasks: The training split.
        sync: Has the engine.
        store: Where all attempts are kept.
        observer: Told how it stands.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: LearnerConfig,
        *,
        source: EnvSource,
        agent: Agent,
        renderer: Any,
        tasks: TrainingTasks,
        sync: WeightSync,
        store: TrajectoryStore,
        observer: Observer,
    ) -> None:
        self.store = store
        self._recipe = recipe
        self._algorithm = algorithm
        self._outcomes = recipe.outcome_policy
        self._source = source
        self._tasks = tasks
        self._sync = sync
        self._observer = observer
        self._places = Places(recipe.rollout.concurrency)
        self._display = _Display(observer)
        self._shared: dict[str, Any] = {
            "renderer": renderer,
            "agent": agent,
            "seed": recipe.seed,
            "policy": self._outcomes,
            "store": store,
            "provenance": {"recipe": recipe.digest},
            "training": True,
            "places": self._places,
        }

    def expert(self, stage: int, tally: Tally) -> list[Trajectory]:
        """The expert's episodes for a stage of the warm start."""
        warm = self._recipe.warm_start[stage]
        first = sum(earlier.tasks for earlier in self._recipe.warm_start[:stage])
        if first + warm.tasks > len(self._tasks.table):
            first = 0  # a small split is played again
        tasks = run_blocking(split_tasks(self._source, "train", warm.tasks, start=first))
        self._observer.stage("expert", len(tasks))
        return run_blocking(
            collect(
                self._source,
                tasks,
                phase="expert",
                iteration=stage,
                config=self._recipe.rollout.model_copy(update={"samples": 1}),
                sampling=self._recipe.sampling.sampling,
                expert=warm.expert,
                tally=tally,
                on_trajectory=lambda _: self._observer.advance(tally.episodes, tally_numbers(tally)),
                **self._shared,
            )
        )

    def evaluate(self, phase: str, tasks: int, iteration: int) -> Evaluation:
        """Play a held-out split; `test-greedy` is the test split at temperature 0."""
        recipe, tally = self._recipe, Tally()
        sampling = recipe.sampling.sampling
        if phase == "test-greedy":
            sampling = replace(sampling, temperature=0.0)
        self._observer.stage(phase, tasks * recipe.evaluation.samples)
        return run_blocking(
            evaluate_async(
                self._source,
                self._sync.engine,
                split=phase.partition("-")[0],
                tasks=tasks,
                config=recipe.rollout.model_copy(update={"samples": recipe.evaluation.samples}),
                phase=phase,
                iteration=iteration,
                sampling=sampling,
                tally=tally,
                rank=_FIRST,
                on_trajectory=lambda _: self._observer.advance(tally.episodes, tally_numbers(tally)),
                **self._shared,
            )
        )

    def watch(self, iteration: int | None) -> None:
        """Show the observer the lot of this iteration from now on; None: of none."""
        self._display.watch(iteration)

    async def play(self, iteration: int) -> Lot:
        """The lot of an iteration: its tasks, and others in the place of those that can teach nothing (see `refill`).

        Raises `RunStoppedError` where too many episodes failed.
        """
        tasks = await threads.run(self._tasks.of, iteration)
        learned = await self._round(iteration, f"rollout {iteration}", tasks)
        left_out: list[Trajectory] = []
        had = {task.id for task in tasks}
        rounds, replaced = 0, 0
        while rounds < self._recipe.refill.rounds:
            dull = await threads.run(without_signal, learned, self._outcomes, self._algorithm)
            if not dull:
                break
            draw = partial(self._tasks.others, iteration, rounds + 1, len(dull), without=had)
            others = await threads.run(draw)
            if not others:  # the split has no more
                break
            rounds, replaced = rounds + 1, replaced + len(others)
            gone = set(sorted(dull)[: len(others)])
            left_out += [trajectory for trajectory in learned if trajectory.id.group in gone]
            learned = [trajectory for trajectory in learned if trajectory.id.group not in gone]
            learned += await self._round(iteration, f"rollout {iteration}, refill {rounds}", others)
            had |= {task.id for task in others}
        metrics: dict[str, float] = {}
        if self._recipe.refill.rounds:
            metrics = {"refill_rounds": float(rounds), "refilled_groups": float(replaced)}
        return Lot(iteration, tuple(learned), tuple(left_out), metrics)

    async def freshen(self, lot: Lot, updates: int) -> Lot:
        """The lot without trajectories that are too old to be learned from; others are played in their place.

        Args:
            lot: As it was played.
            updates: Updates that the policy has made by now.
        """
        overlap = self._recipe.overlap
        if overlap.kind == "none":
            return lot
        bound, learned, left_out = overlap.max_staleness, list(lot.learned), list(lot.left_out)
        stale = [t for t in learned if bound is not None and (staleness(t, updates) or 0) > bound]
        if stale:
            gone = {trajectory.id for trajectory in stale}
            learned = [trajectory for trajectory in learned if trajectory.id not in gone]
            left_out += stale
            tasks = {trajectory.id.task_id: Task.from_dict(trajectory.task) for trajectory in stale}
            free = {name: 1 + max(t.id.sample for t in lot.played if t.id.task_id == name) for name in tasks}
            samples = {
                name: range(first, first + sum(t.id.task_id == name for t in stale)) for name, first in free.items()
            }
            name = f"rollout {lot.iteration}, in place of {len(stale)} stale"
            learned += await self._round(lot.iteration, name, list(tasks.values()), samples=samples)
        metrics = {**lot.metrics, **staleness_metrics(learned, updates)}
        if overlap.publishes_in_flight:
            metrics["stale_dropped"] = float(len(stale))
        return Lot(lot.iteration, tuple(learned), tuple(left_out), metrics)

    async def _round(
        self, iteration: int, name: str, tasks: Sequence[Task], *, samples: Mapping[str, Sequence[int]] | None = None
    ) -> list[Trajectory]:
        recipe, tally = self._recipe, Tally()
        planned = len(tasks) * recipe.rollout.samples if samples is None else sum(map(len, samples.values()))
        self._display.begin(iteration, _Round(name, planned, tally))
        return await collect(
            self._source,
            tasks,
            self._sync.engine,
            phase="train",
            iteration=iteration,
            config=recipe.rollout,
            sampling=recipe.sampling.sampling,
            samples=samples,
            # A few that are played in the place of others are no iteration of their own.
            share_of=recipe.budget.tasks_per_iteration * recipe.rollout.samples,
            tally=tally,
            rank=iteration,
            on_trajectory=lambda _: self._display.advance(iteration),
            **self._shared,
        )


@dataclass(frozen=True, slots=True)
class _Round:
    """What of a lot is being played."""

    name: str
    planned: int
    tally: Tally


class _Display:
    """Shows an observer one lot of several that are played at once: the one that is waited for."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}
        self._watched: int | None = None

    def watch(self, iteration: int | None) -> None:
        """Show this one from now on."""
        with self._lock:
            if iteration is None and self._watched is not None:
                self._rounds.pop(self._watched, None)  # it has been taken
            self._watched = iteration
            if iteration in self._rounds:
                self._show(self._rounds[iteration])

    def begin(self, iteration: int, round_: _Round) -> None:
        """A round of a lot begins."""
        with self._lock:
            self._rounds[iteration] = round_
            if iteration == self._watched:
                self._show(round_)

    def advance(self, iteration: int) -> None:
        """An episode of a lot has ended."""
        with self._lock:
            if iteration == self._watched:
                tally = self._rounds[iteration].tally
                self._observer.advance(tally.episodes, tally_numbers(tally))

    def _show(self, round_: _Round) -> None:
        self._observer.stage(round_.name, round_.planned)
        if round_.tally.episodes:
            self._observer.advance(round_.tally.episodes, tally_numbers(round_.tally))


def tally_numbers(tally: Tally) -> dict[str, float]:
    """How episodes stand, for a display."""
    return {
        "reward": tally.mean_reward,
        "success": tally.success,
        "turns": tally.turns / max(1, tally.attempts),
        "tokens_per_second": tally.tokens_per_second,
    }
