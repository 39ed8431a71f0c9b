"""The whole of a training run: warm start, rollouts and updates in turn, evaluation, checkpoints, resuming."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepgym.config import validate
from stepgym.env.base import Env
from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.env.worker import run_blocking, threads
from stepgym.errors import UserError
from stepgym.model.engines.base import Engine
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.env_source import EnvSource
from stepgym.run.evaluation import evaluate_async, split_tasks
from stepgym.run.folder import RunFolder
from stepgym.run.rollouts import collect
from stepgym.run.statistics import Evaluation
from stepgym.run.tally import Tally
from stepgym.seeds import derive_seed
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.curve import draw_curve
from stepgym.train.eligibility import require_trainable_sampling
from stepgym.train.learner import Learner
from stepgym.train.observer import Observer
from stepgym.train.policy import Policy, PolicyConfig
from stepgym.train.recipe import Recipe
from stepgym.train.setup import env_source, load_model, make_agent, make_renderer, set_threads
from stepgym.train.sft import sft
from stepgym.train.sync import check_sync, make_sync

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """What a training run came to; `to_dict` is its `summary.json`.

    Attributes:
        success_before, success_after: Share of solved test episodes, sampled, before and after reinforcement.
        greedy_before, greedy_after: The same at temperature 0; None unless the recipe asks for it.
        held_out_tasks: Number of test tasks.
        updates: Optimizer steps of reinforcement.
        iterations: Batches of rollouts.
        outcomes: Training episodes by outcome, most frequent first.
        best_iteration: The iteration whose weights are reported and exported: the best on the validation split, or
            the last where there is none.
        seed: The run's seed.
        wall_s: Seconds since the run was first started; a resumed run counts its pauses too.
        seconds: Seconds by stage, in this process.
        model: Folder of the final model, as `transformers` loads it.
    """

    success_before: float | None
    success_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    held_out_tasks: int
    updates: int
    iterations: int
    outcomes: Mapping[str, int]
    best_iteration: int
    seed: int
    wall_s: float
    seconds: Mapping[str, float]
    model: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def train(recipe: Recipe, folder: RunFolder, observer: Observer | None = None) -> TrainingResult:
    """Run a recipe in a folder; a folder that holds part of the run already is gone on with.

    Raises:
        UserError: The recipe cannot work with the model or the data at hand.
        RunStoppedError: Too many episodes failed by environment or infrastructure.
    """
    run = _Run(recipe, folder, observer or Observer())
    try:
        return run.run()
    finally:
        run.close()
        close_shared()


def check_training(recipe: Recipe) -> None:
    """Refuse a recipe that cannot train, as far as that shows without its environment and its model.

    Raises:
        UserError: In one line, which names the field.
    """
    algorithm = recipe.learner_config()
    for stage in range(len(recipe.warm_start)):
        recipe.sft_config(stage)
    validate(PolicyConfig, recipe.policy, "policy")
    check_sync(recipe)
    if recipe.budget.iterations:
        require_trainable_sampling(recipe.sampling.sampling, correction=algorithm.correction.kind != "none")


class _Run:
    """One process's part of a run."""

    def __init__(self, recipe: Recipe, folder: RunFolder, observer: Observer) -> None:
        self.recipe = recipe
        self.folder = folder
        self.observer = observer
        self.seconds: dict[str, float] = {}
        # Everything that can be wrong in the recipe is found before anything is made.
        check_training(recipe)
        self.learner_config = recipe.learner_config()
        self.outcomes = recipe.outcome_policy
        self.source = env_source(recipe)
        self.agent = make_agent(recipe)
        self.table = run_blocking(training_table(self.source))
        wanted, size = recipe.budget.tasks_per_iteration, len(self.table)
        if recipe.budget.iterations and wanted > size:
            raise UserError(f"budget.tasks_per_iteration: the training split has {size} tasks, fewer than {wanted}")
        set_threads(recipe)

        observer.stage("model", None)
        with self._timed("model"):
            model, self.tokenizer = run_blocking(load_model(recipe, self.source))
        self.renderer = folder.keep_renderer(make_renderer(recipe.renderer, self.tokenizer))
        config = validate(PolicyConfig, recipe.policy, "policy")
        self.policy = Policy(model, config, seed=derive_seed(recipe.seed, "adapter"))
        self.store = TrajectoryStore(folder.trajectories, "a")
        self.checkpoints = CheckpointStore(folder.checkpoints, keep=recipe.checkpoint.keep)
        self.sync = make_sync(recipe, self.policy, self.tokenizer, folder.path / "engine")
        self.version = ""  # of the policy's weights
        self.published: str | None = None  # what the engine has of them

    def close(self) -> None:
        """Give back the engine and the store."""
        run_blocking(self.sync.close())
        self.store.close()

    def run(self) -> TrainingResult:
        """The whole run, or what is left of it."""
        recipe, tests = self.recipe, self.recipe.evaluation.test_tasks
        if recipe.budget.iterations or tests:
            run_blocking(self.sync.start())
        learner, done = self._begin()
        before = self._evaluate("test", tests, 0)
        before_greedy = self._evaluate("test-greedy", tests, 0) if recipe.evaluation.greedy else None
        last_saved = done
        for iteration in range(done + 1, recipe.budget.iterations + 1):
            started = time.perf_counter()
            trajectories = self._rollouts(iteration)
            with self._timed("update"):
                run_blocking(self.sync.before_update())
                report = learner.update(trajectories, self.outcomes)
                run_blocking(self.sync.after_update())
            self.version, self.published = str(learner.updates), None
            row: dict[str, Any] = {"iteration": iteration, **_rollout_metrics(trajectories), **report.metrics}
            every = recipe.evaluation.every
            score = None
            if every and iteration % every == 0:
                validation = self._evaluate("validation", recipe.evaluation.validation_tasks, iteration)
                score = validation.success if validation else None
                row["validation_success"] = score
            row["iteration_s"] = time.perf_counter() - started
            self.folder.add_metrics(row)
            self.observer.iteration(iteration, row)
            due = score is not None or iteration % recipe.checkpoint.every == 0
            if due or iteration == recipe.budget.iterations:
                self._save(learner, iteration, score)
                last_saved = iteration
        best = self.checkpoints.best()
        best_iteration = last_saved
        if best is not None:
            self.checkpoints.restore(learner, best)
            self.version, self.published = str(best.update), None
            best_iteration = int(best.extra["iteration"])
        after = self._evaluate("test", tests, best_iteration)
        after_greedy = self._evaluate("test-greedy", tests, best_iteration) if recipe.evaluation.greedy else None
        final = best or self.checkpoints.latest()
        assert final is not None  # one is written before the first iteration
        result = TrainingResult(
            success_before=before.success if before else None,
            success_after=after.success if after else None,
            greedy_before=before_greedy.success if before_greedy else None,
            greedy_after=after_greedy.success if after_greedy else None,
            held_out_tasks=after.tasks if after else 0,
            updates=final.update,
            iterations=recipe.budget.iterations,
            outcomes=_outcomes(self.folder.metrics()),
            best_iteration=best_iteration,
            seed=recipe.seed,
            wall_s=time.time() - self.folder.started_at,
            seconds=self.seconds,
            model=str(final.model_path),
        )
        self.folder.write_summary(result.to_dict())
        draw_curve(
            self.folder.path / "curve.png", list(self.folder.metrics()), result.success_before, result.success_after
        )
        return result

    # ---- its parts --------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Learner, int]:
        """The learner where it was left, or after the warm start; and the number of iterations that are done."""
        if self.policy.adapter is not None and self.recipe.warm_start and self.learner_config.kl.kind != "none":
            self.observer.note("the KL term's reference is the model without its adapter, as before the warm start")
        latest = self.checkpoints.latest()
        if latest is None:
            self.folder.keep_metrics(lambda row: False)
            for stage in range(len(self.recipe.warm_start)):
                self._warm_start(stage)
            learner = Learner(self.policy, self.learner_config)
            self._save(learner, 0, None)
            done = 0
        else:
            learner = Learner(self.policy, self.learner_config)
            self.checkpoints.restore(learner, latest)
            done = int(latest.extra["iteration"])
            self.folder.keep_metrics(lambda row: row.get("iteration", 0) <= done)
            self.observer.note(f"going on after iteration {done}")
        self.version = str(learner.updates)
        return learner, done

    def _warm_start(self, stage: int) -> None:
        warm, config = self.recipe.warm_start[stage], self.recipe.sft_config(stage)
        name = "warm start" if len(self.recipe.warm_start) == 1 else f"warm start {stage + 1}"
        first = sum(earlier.tasks for earlier in self.recipe.warm_start[:stage])
        if first + warm.tasks > len(self.table):
            first = 0  # a small split is played again
        with self._timed("expert"):
            tasks = run_blocking(split_tasks(self.source, "train", warm.tasks, start=first))
            once = self.recipe.rollout.model_copy(update={"samples": 1})
            tally = Tally()
            self.observer.stage("expert", len(tasks))
            episodes = self._collect(tasks, "expert", stage, tally, config=once, expert=warm.expert)
        self.observer.note(f"{name}: the expert solved {tally.success:.0%} of {len(episodes)} training tasks")
        self.observer.stage(name, config.updates)
        with self._timed("warm_start"):
            kept = [episode for episode in episodes if self.outcomes[episode.outcome].train]
            report = sft(self.policy, kept, config, progress=self.observer.advance)
        self.folder.add_metrics({"iteration": 0, "warm_start": report.to_dict()})
        self.observer.note(f"{name}: {report.accuracy:.1%} of the expert's tokens are the most likely ones")

    def _rollouts(self, iteration: int) -> list[Trajectory]:
        recipe = self.recipe
        tasks = self._training_tasks(iteration)
        engine, tally = self._engine(), Tally()
        self.observer.stage(f"rollout {iteration}", len(tasks) * recipe.rollout.samples)
        with self._timed("rollout"):
            return self._collect(tasks, "train", iteration, tally, config=recipe.rollout, engine=engine)

    def _engine(self) -> Engine:
        """The engine, once it can sample and has the policy's weights."""
        if self.published is None:
            if not self.seconds.get("engine") and self.sync.waits_for:
                self.observer.stage(self.sync.waits_for, None)
            with self._timed("engine"):
                run_blocking(self.sync.open(self.observer.doing))
            with self._timed("sync"):
                run_blocking(self.sync.publish(self.version))
            self.published = self.version
        return self.sync.engine

    def _training_tasks(self, iteration: int) -> list[Task]:
        """The tasks of an iteration: the split in order, or anew in a seeded order for every pass over a small one."""
        count = self.recipe.budget.tasks_per_iteration
        size = len(self.table)
        first = self.recipe.warm_start_tasks
        if size >= first + count * self.recipe.budget.iterations:
            positions = range(first + (iteration - 1) * count, first + iteration * count)
        else:
            per_pass = size // count
            turn, place = divmod(iteration - 1, per_pass)
            order = np.random.default_rng(derive_seed(self.recipe.seed, "order", turn)).permutation(size)
            positions = order[place * count : (place + 1) * count].tolist()
        rows = [self.table[int(position)] for position in positions]
        return [row if isinstance(row, Task) else Task.from_dict(row) for row in rows]

    def _collect(
        self, tasks: Sequence[Task], phase: str, iteration: int, tally: Tally, **options: Any
    ) -> list[Trajectory]:
        def told(trajectory: Trajectory) -> None:
            self.observer.advance(tally.episodes, _tally_numbers(tally))

        return run_blocking(
            collect(
                self.source,
                tasks,
                renderer=self.renderer,
                agent=self.agent,
                sampling=self.recipe.sampling.sampling,
                policy=self.outcomes,
                phase=phase,
                iteration=iteration,
                seed=self.recipe.seed,
                store=self.store,
                provenance={"recipe": self.recipe.digest},
                tally=tally,
                training=True,
                on_trajectory=told,
                **options,
            )
        )

    def _evaluate(self, phase: str, tasks: int, iteration: int) -> Evaluation | None:
        """Play a held-out split; `test-greedy` is the test split at temperature 0. None where no tasks are wanted."""
        if tasks == 0:
            return None
        recipe, engine, tally = self.recipe, self._engine(), Tally()
        sampling = recipe.sampling.sampling
        if phase == "test-greedy":
            sampling = replace(sampling, temperature=0.0)
        self.observer.stage(phase, tasks * recipe.evaluation.samples)
        with self._timed("evaluation"):
            return run_blocking(
                evaluate_async(
                    self.source,
                    engine,
                    split=phase.partition("-")[0],
                    tasks=tasks,
                    config=recipe.rollout.model_copy(update={"samples": recipe.evaluation.samples}),
                    seed=recipe.seed,
                    phase=phase,
                    iteration=iteration,
                    policy=self.outcomes,
                    tally=tally,
                    training=True,
                    on_trajectory=lambda _: self.observer.advance(tally.episodes, _tally_numbers(tally)),
                    renderer=self.renderer,
                    agent=self.agent,
                    sampling=sampling,
                    store=self.store,
                    provenance={"recipe": recipe.digest},
                )
            )

    def _save(self, learner: Learner, iteration: int, score: float | None) -> None:
        with self._timed("checkpoint"):
            self.store.flush()
            latest = self.checkpoints.latest()
            if score is None and latest is not None and latest.update == learner.updates:
                score = latest.score  # the same weights: no group had a signal since they were measured
            self.checkpoints.save(learner, tokenizer=self.tokenizer, score=score, extra={"iteration": iteration})

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


async def training_table(source: EnvSource) -> Sequence[Any]:
    """The tasks of the training split, as the environment gives them."""
    env = source.make()
    try:
        unwrapped: Env = env.unwrapped  # type: ignore[assignment]
        table: Sequence[Any] = await threads.run(unwrapped.tasks, "train")
        return table
    finally:
        await threads.run(env.close)


def _outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The training episodes of all iterations, by outcome."""
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith("outcome/"):
                counts[name.removeprefix("outcome/")] += int(value)
    return dict(counts.most_common())


def _tally_numbers(tally: Tally) -> dict[str, float]:
    return {
        "reward": tally.mean_reward,
        "success": tally.success,
        "turns": tally.turns / max(1, tally.attempts),
        "tokens_per_second": tally.tokens_per_second,
    }


def _rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What the rollouts of an iteration were like, before any treatment."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    outcomes = Counter(str(trajectory.outcome) for trajectory in trajectories)
    return {
        "turns_mean": len(steps) / max(1, len(trajectories)),
        "response_tokens_mean": float(np.mean([t.metrics.get("response_tokens", 0.0) for t in trajectories])),
        "malformed_rate": sum(step.status == "malformed" for step in steps) / max(1, len(steps)),
        "no_action_rate": sum(step.status == "no_action" for step in steps) / max(1, len(steps)),
        **{f"outcome/{name}": float(count) for name, count in sorted(outcomes.items())},
    }
