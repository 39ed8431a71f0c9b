"""What `stepgym rollout` and `stepgym eval` share: play a split into a run folder, with progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgym.cli.progress import EpisodeProgress, ProgressDisplay, outcome_lines
from stepgym.config import config_digest
from stepgym.env.shared import close_shared
from stepgym.env.worker import run_blocking
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.record.store import TrajectoryStore
from stepgym.run.evaluation import evaluate_async, split_tasks
from stepgym.run.folder import RunFolder, run_folder
from stepgym.run.rollouts import collect
from stepgym.run.statistics import Evaluation, summarize
from stepgym.run.tally import Tally
from stepgym.train.recipe import Recipe
from stepgym.train.setup import env_source, load_model, make_agent, make_engine, make_renderer, renderer_for


@dataclass(frozen=True, slots=True)
class Play:
    """What to play.

    Attributes:
        out: The run's folder.
        phase: `rollout` or `eval`.
        split: Split of tasks.
        tasks: How many, from its start.
        expert: Options of the environment's expert, which then plays instead of the model; None: the model plays.
    """

    out: Path
    phase: str
    split: str
    tasks: int
    expert: Mapping[str, Any] | None = None


def play_recipe(
    plan: Recipe, play: Play, connect: Callable[[], Awaitable[Engine | ChatEngine]] | None = None
) -> Evaluation:
    """Play, record into `play.out`, write `summary.json`, and return what it says.

    Args:
        plan: The recipe.
        play: What to play.
        connect: Gives an open engine, in place of the recipe's own.
    """
    config = {
        **plan.model_dump(mode="json"),
        "play": {"phase": play.phase, "split": play.split, "tasks": play.tasks, "expert": play.expert},
    }
    with (
        run_folder(play.out, config=config, digest=config_digest(config)) as folder,
        ProgressDisplay() as display,
    ):
        try:
            return run_blocking(_play(plan, play, folder, display, connect))
        except KeyboardInterrupt:
            display.note(f"interrupted; the same command with --out {play.out} goes on")
            raise
        finally:
            close_shared()


async def _play(
    plan: Recipe,
    play: Play,
    folder: RunFolder,
    display: ProgressDisplay,
    connect: Callable[[], Awaitable[Engine | ChatEngine]] | None,
) -> Evaluation:
    source, tally = env_source(plan), Tally()
    tasks = await split_tasks(source, play.split, play.tasks)
    options: dict[str, Any] = {
        "config": plan.rollout,
        "sampling": plan.sampling.sampling,
        "policy": plan.outcome_policy,
        "phase": play.phase,
        "seed": plan.seed,
        "agent": make_agent(plan),
        "tally": tally,
    }

    def begin() -> None:
        options["on_trajectory"] = EpisodeProgress(display, tally, len(tasks) * plan.rollout.samples)

    with TrajectoryStore(folder.trajectories, "a") as store:
        if play.expert is not None:
            _, tokenizer = await load_model(plan, source)
            writer = folder.keep_renderer(make_renderer(plan.renderer, tokenizer))
            begin()
            await collect(source, tasks, renderer=writer, expert=play.expert, store=store, **options)
            # From the store, which also has the attempts that failed and were tried again.
            expected = len(tasks) * plan.rollout.samples
            result = summarize(store.read(phase=play.phase), expected=expected, seed=plan.seed)
        else:
            engine = await (connect() if connect is not None else make_engine(plan, source))
            display.stage(f"engine {engine.kind}", None)
            engine.on_progress = display.doing
            await engine.open()
            try:
                renderer = renderer_for(plan.renderer, engine)
                if renderer is not None:
                    renderer = folder.keep_renderer(renderer)
                begin()
                result = await evaluate_async(source, engine, tasks=tasks, renderer=renderer, store=store, **options)
            finally:
                await engine.close()
    for line in outcome_lines(tally):
        display.note(line)
    folder.write_summary({**result.to_dict(), "tasks_asked": len(tasks), "split": play.split, "seed": plan.seed})
    return result
