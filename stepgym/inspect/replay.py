"""Playing a run's recorded actions again in fresh environments: does the environment answer the same?

Rewards are only worth learning from when the environment gives them again for the same actions. A replay needs no
model: every recorded assistant message is given to an environment of the same id, config, task and seed, and what it
answers is compared with the record.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow.dataset as pads

from stepgym.env.registry import env_class, env_names
from stepgym.env.worker import run_blocking, threads
from stepgym.errors import UserError
from stepgym.inspect.difference import Difference
from stepgym.inspect.recorded_run import RecordedRun
from stepgym.inspect.replayed_episode import ReplayedEpisode, replay_episode
from stepgym.plugins import import_target, unknown
from stepgym.record.json_text import dump_json, dump_text, load_text
from stepgym.record.outcome import Outcome
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.env_source import EnvSource
from stepgym.run.episode import EpisodeLimits
from stepgym.run.rollouts import EnvLike

Wanted = str | Collection[str] | None


@dataclass(frozen=True, slots=True)
class Replay:
    """What replaying a run came to.

    Attributes:
        path: The run.
        played: Trajectories whose actions were played to the end.
        equal: Those of them without a difference.
        turns: Actions played.
        observations: Answers of environments that were compared with the record. What an environment says at the very
            end of an episode is shown to no model, so it is in no record.
        differences: Everything that was not the same, by trajectory and turn.
        problems: Trajectory id and reason of each that could not be played to the end, by kind: `not_replayable`,
            `no_environment`, `failed` (see `ReplayedEpisode`).
        skipped: Attempts that failed or were repeated, by outcome, left out because `attempts` was not asked for.
        wall_s: Seconds that it took.
    """

    path: str
    played: int = 0
    equal: int = 0
    turns: int = 0
    observations: int = 0
    differences: tuple[Difference, ...] = ()
    problems: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every trajectory could be played to its end, and there was one."""
        return self.played > 0 and not any(self.problems.values())

    @property
    def exit_code(self) -> int:
        """0 all equal, 1 differences, 3 some (or all) could not be replayed."""
        return 1 if self.differences else 0 if self.complete else 3

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "path": self.path,
            "played": self.played,
            "equal": self.equal,
            "turns": self.turns,
            "observations": self.observations,
            "differences": [difference.to_dict() for difference in self.differences],
            "problems": {kind: dict(found) for kind, found in self.problems.items()},
            "skipped": dict(self.skipped),
            "complete": self.complete,
            "wall_s": self.wall_s,
        }


def replay(path: str | os.PathLike[str], **options: Any) -> Replay:
    """Play a run's recorded actions again and compare. Arguments as of `replay_async`.

    Works in scripts, in notebooks and inside a running event loop.
    """
    return run_blocking(replay_async(path, **options))


async def replay_async(
    path: str | os.PathLike[str],
    *,
    phase: Wanted = None,
    outcome: Wanted = None,
    task: Wanted = None,
    limit: int | None = None,
    attempts: bool = False,
    concurrency: int = 16,
    limits: EpisodeLimits | None = None,
    env: EnvLike | None = None,
    on_episode: Callable[[ReplayedEpisode], None] | None = None,
) -> Replay:
    """Play a run's recorded actions again in fresh environments, and report where they answer differently.

    Args:
        path: A run's folder, or a folder of trajectories.
        phase, outcome, task: Only these; each a name or several.
        limit: At most so many trajectories, in the order of their ids.
        attempts: Also attempts that failed (played up to their failure) or were repeated.
        concurrency: Episodes at once.
        limits: Time limits; None takes those of the run's config, else the defaults of `EpisodeLimits`.
        env: In place of the recorded environment: an id or class (with the recorded config), or a function that makes
            one (for wrapped environments).
        on_episode: Called with each episode as it ends.

    Raises:
        UserError: There is no such run, an outcome or `env` is unknown, or nothing in the run fits what was asked for.
    """
    run = RecordedRun.of(path)
    started = time.perf_counter()
    with run.store() as store:
        selection = _Selection(store, _filters(phase, outcome, task), limit, attempts)
        replayed = await _play(selection, _Sources(env), limits or recorded_limits(run), concurrency, on_episode)
    replayed.sort(key=lambda item: selection.order[item.trajectory])
    problems: dict[str, dict[str, str]] = {"not_replayable": {}, "no_environment": {}, "failed": {}}
    for item in replayed:
        if item.problem:
            problems[item.kind][item.trajectory] = item.problem
    played = [item for item in replayed if not item.problem]
    return Replay(
        path=str(run.path),
        played=len(played),
        equal=sum(not item.differences for item in played),
        turns=sum(item.turns for item in replayed),
        observations=sum(item.observations for item in replayed),
        differences=tuple(difference for item in replayed for difference in item.differences),
        problems=problems,
        skipped=dict(selection.skipped),
        wall_s=time.perf_counter() - started,
    )


def count_replayable(path: str | os.PathLike[str], *, attempts: bool = False, **filters: Any) -> int:
    """How many trajectories `replay` would play with these filters; reads no steps. Raises as `replay_async`."""
    limit = filters.pop("limit", None)
    with RecordedRun.of(path).store() as store:
        return len(_Selection(store, _filters(**filters), limit, attempts).order)


def _filters(phase: Wanted = None, outcome: Wanted = None, task: Wanted = None) -> dict[str, Any]:
    outcomes = [outcome] if isinstance(outcome, str) else list(outcome or ())
    for name in outcomes:
        if name not in set(Outcome):
            raise UserError(f"replay: {unknown('outcome', name, [str(known) for known in Outcome])}")
    given = {"phase": phase, "outcome": [str(name) for name in outcomes] or None, "task_id": task}
    return {name: value for name, value in given.items() if value is not None}


def recorded_limits(run: RecordedRun) -> EpisodeLimits:
    """The time limits of the run's config; the defaults of `EpisodeLimits` where it has none."""
    section, default = run.section("rollout"), EpisodeLimits()
    return EpisodeLimits(
        step_timeout=section.get("step_timeout", default.step_timeout),
        episode_timeout=section.get("episode_timeout", default.episode_timeout),
    )


@dataclass(eq=False)
class _Selection:
    """The trajectories to play, by id; read one by one so that memory stays bounded.

    Attributes:
        order: Id as text to its place among those that are played.
        skipped: How many are left out because they failed or were repeated, by outcome.
    """

    store: TrajectoryStore
    filters: Mapping[str, Any]
    limit: int | None
    attempts: bool
    skipped: Counter[str] = field(default_factory=Counter)
    order: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = []
        for row in self.store.table(["id", "outcome", "final"], **self.filters).to_pylist():
            if self.attempts or (row["final"] and Outcome(row["outcome"]).scored):
                wanted.append(TrajectoryId.parse(load_text(row["id"])))
            else:
                self.skipped[row["outcome"]] += 1
        self.order = {str(key): place for place, key in enumerate(sorted(wanted)[: self.limit])}
        if not self.order and not self.skipped:
            raise UserError(f"{self.store.path}: {self._what_there_is()}")

    def _what_there_is(self) -> str:
        if not len(self.store):
            return "the run has no trajectories yet"
        table = self.store.table(["phase", "outcome"])
        phases, outcomes = (", ".join(sorted(set(table.column(name).to_pylist()))) for name in ("phase", "outcome"))
        return f"no trajectory fits; phases here: {phases}; outcomes: {outcomes}"

    def __iter__(self) -> Iterator[Trajectory]:
        few = pads.field("id").isin([dump_text(name) for name in self.order]) if self.limit is not None else None
        for trajectory in self.store.read(where=few, **self.filters):
            if str(trajectory.id) in self.order:
                yield trajectory


@dataclass(eq=False)
class _Sources:
    """Where environments come from: one source for each id and config."""

    given: EnvLike | None
    known: dict[str, EnvSource] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.given, str):
            self.given = _resolved(self.given)

    def of(self, trajectory: Trajectory) -> EnvSource:
        """The source of a trajectory's environment. Raises what finding or configuring its class raises."""
        key = (
            ""
            if callable(self.given) and not isinstance(self.given, type)
            else (f"{trajectory.env_id}\n{dump_json(trajectory.env_config, sort_keys=True)}")
        )
        if key not in self.known:
            self.known[key] = self._find(trajectory)
        return self.known[key]

    def _find(self, trajectory: Trajectory) -> EnvSource:
        env = self.given if self.given is not None else _resolved(trajectory.env_id)
        if isinstance(env, type):
            return EnvSource.of(env, **trajectory.env_config)
        return EnvSource.of(env)


def _resolved(name: str) -> EnvLike:
    """What an id, a short name or `module:Name` stands for: a class, or a function that makes environments."""
    if ":" not in name or name in env_names():
        return env_class(name)
    found: EnvLike = _loaded(name) or import_target(name, f"environment {name!r}")
    return found


def _loaded(target: str) -> Any:
    """What `module:Name` names where the module is loaded, or None.

    Importing a module that is still being imported (a script that records and replays) would wait for it for ever.
    """
    module, _, name = target.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


async def _play(
    selection: _Selection,
    sources: _Sources,
    limits: EpisodeLimits,
    concurrency: int,
    on_episode: Callable[[ReplayedEpisode], None] | None,
) -> list[ReplayedEpisode]:
    waiting, reading = iter(selection), asyncio.Lock()
    done: list[ReplayedEpisode] = []

    async def work() -> None:
        while True:
            async with reading:
                trajectory = await threads.run(partial(next, waiting, None))
            if trajectory is None:
                return
            try:
                source = sources.of(trajectory)
            except Exception as error:  # an unknown id, a config that no longer fits, a module that does not import
                name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                reason = f"the environment cannot be made: {name}{' '.join(str(error).split())}"
                item = ReplayedEpisode(str(trajectory.id), problem=reason[:500], kind="no_environment")
            else:
                item = await replay_episode(trajectory, source, limits)
            done.append(item)
            if on_episode is not None:
                on_episode(item)

    if concurrency < 1:
        raise UserError(f"replay: concurrency must be at least 1, not {concurrency}")
    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return done
