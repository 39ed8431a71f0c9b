"""The whole of a training run: warm start, rollouts and updates in turn, evaluation, checkpoints, resuming."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any

from stepgym.config import validate
from stepgym.env.shared import close_shared
from stepgym.env.worker import run_blocking
from stepgym.errors import UserError
from stepgym.record.store import TrajectoryStore
from stepgym.run.folder import RunFolder
from stepgym.run.statistics import Evaluation
from stepgym.run.tally import Tally
from stepgym.seeds import derive_seed
from stepgym.train.checkpoint import Checkpoint, CheckpointStore
from stepgym.train.curve import draw_curve
from stepgym.train.eligibility import require_trainable_sampling
from stepgym.train.episodes import Episodes
from stepgym.train.learner import Learner
from stepgym.train.lots import Lot, Lots
from stepgym.train.metrics_log import MetricsLog
from stepgym.train.observer import Observer
from stepgym.train.overlap import check_overlap
from stepgym.train.parallel.processes import Processes
from stepgym.train.phases import PhaseTimes, memory_metrics, throughput_metrics
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig
from stepgym.train.recipe import Recipe
from stepgym.train.refill import check_refill
from stepgym.train.result import TrainingResult, count_outcomes, run_totals
from stepgym.train.rollout_metrics import rollout_metrics
from stepgym.train.setup import env_source, load_model_everywhere, make_agent, make_renderer, set_threads
from stepgym.train.sft import sft
from stepgym.train.sync import WeightSync, check_sync, find_sync, make_sync
from stepgym.train.training_tasks import TrainingTasks, training_table

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe, folder: RunFolder | None, observer: Observer | None = None, processes: Processes | None = None
) -> TrainingResult:
    """Run a recipe in a folder; a folder that holds part of the run already is gone on with.

    Args:
        recipe: What to do.
        folder: The run's folder, which only rank 0 has; None on the others.
        observer: Told what happens, on rank 0.
        processes: The ranks, all of which call this; None: those that torchrun started, or this process alone.

    Raises:
        UserError: The recipe cannot work with the model or the data at hand.
        RunStoppedError: Too many episodes failed by environment or infrastructure.
    """
    with ExitStack() as stack:
        if processes is None:
            processes = stack.enter_context(Processes.start(recipe.policy.get("device", "auto")))
        check_training(recipe, processes.size)
        stack.callback(close_shared)
        return _Run(recipe, folder, observer or Observer(), processes, stack).run()


def check_training(recipe: Recipe, processes: int = 1) -> None:
    """Refuse a recipe that cannot train, as far as that shows without its environment and its model.

    Args:
        recipe: What to look at.
        processes: How many shall train.

    Raises:
        UserError: In one line, which names the field.
    """
    algorithm = recipe.learner_config()
    for stage in range(len(recipe.warm_start)):
        recipe.sft_config(stage)
    validate(PolicyConfig, recipe.policy, "policy")
    check_sync(recipe, processes)
    recipe.metrics.require_packages()
    if recipe.budget.iterations:
        require_trainable_sampling(recipe.sampling.sampling, correction=algorithm.correction.kind != "none")
        check_overlap(recipe.overlap, algorithm)
        check_refill(recipe.refill, algorithm, recipe.rollout.samples)


class _Run:
    """One process's part of a run.

    All ranks do the same, in the same order. What happens once happens on rank 0 (`Processes.lead`): it alone has the
    folder, the environments, the engine and the episodes, and gives what was played to the others.
    """

    tasks: TrainingTasks  # rank 0 only, as all up to `log`
    episodes: Episodes
    lots: Lots
    sync: WeightSync
    folder: RunFolder
    log: MetricsLog

    def __init__(
        self, recipe: Recipe, folder: RunFolder | None, observer: Observer, processes: Processes, stack: ExitStack
    ) -> None:
        self.recipe = recipe
        self.processes = processes
        self.observer = observer if processes.is_lead else Observer()
        self.times = PhaseTimes()
        self.algorithm = recipe.learner_config()
        self.outcomes = recipe.outcome_policy
        self.version = ""  # of the policy's weights
        self.published: str | None = None  # what the engine has of them
        config = validate(PolicyConfig, recipe.policy, "policy")
        set_threads(recipe, processes.local_size)
        if folder is not None:
            self.folder = folder
        self.source = env_source(recipe)
        processes.lead(self._find_tasks)

        self.observer.stage("model", None)
        with self.times.phase("model"):
            model, self.tokenizer = load_model_everywhere(recipe, self.source, processes)
        kind = find_sync(recipe, processes.size)
        plain = kind.before_policy(model) if processes.is_lead else None
        self.policy = Policy(model, config, seed=derive_seed(recipe.seed, "adapter"), processes=processes)
        for note in self.policy.notes:
            self.observer.note(note)
        self._gather = kind.gather
        weights = self._gather(recipe, self.policy, start=True)
        self.checkpoints = CheckpointStore(processes.lead(lambda: self.folder.checkpoints), keep=recipe.checkpoint.keep)

        def open_lead() -> None:
            renderer = self.folder.keep_renderer(make_renderer(recipe.renderer, self.tokenizer))
            store = stack.enter_context(TrajectoryStore(self.folder.trajectories, "a"))
            self.log = MetricsLog(recipe.metrics, self.folder, self.observer, recipe.model_dump(mode="json"))
            stack.callback(self.log.close)
            logs = self.folder.path / "engine"
            self.sync = make_sync(recipe, self.policy, self.tokenizer, logs, plain=plain, weights=weights)
            stack.callback(lambda: run_blocking(self.sync.close()))
            self.episodes = Episodes(
                recipe,
                self.algorithm,
                source=self.source,
                agent=make_agent(recipe),
                renderer=renderer,
                tasks=self.tasks,
                sync=self.sync,
                store=store,
                observer=self.observer,
            )
            self.lots = Lots(self.episodes.play, ahead=recipe.overlap.ahead, last=recipe.budget.iterations)
            stack.callback(self.lots.close)

        processes.lead(open_lead)

    def run(self) -> TrainingResult:
        """The whole run, or what is left of it."""
        recipe, tests = self.recipe, self.recipe.evaluation.test_tasks
        if recipe.budget.iterations or tests:
            self.processes.lead(lambda: run_blocking(self.sync.start()))
        learner, done = self._begin()
        before = self._evaluate("test", tests, 0)
        before_greedy = self._evaluate("test-greedy", tests, 0) if recipe.evaluation.greedy else None
        self.times.begin_lap()
        for iteration in range(done + 1, recipe.budget.iterations + 1):
            self._iterate(learner, iteration)
        best = self.processes.lead(self.checkpoints.best)
        final = best or self.processes.lead(self.checkpoints.latest)
        assert final is not None  # one is written before the first iteration
        if best is not None:
            self.checkpoints.restore(learner, best)
            self.version, self.published = str(best.update), None
        at = int(final.extra["iteration"])
        after = self._evaluate("test", tests, at)
        after_greedy = self._evaluate("test-greedy", tests, at) if recipe.evaluation.greedy else None
        return self.processes.lead(lambda: self._conclude(final, before, after, before_greedy, after_greedy))

    # ---- its parts --------------------------------------------------------------------------------------------------

    def _find_tasks(self) -> None:
        recipe, table = self.recipe, run_blocking(training_table(self.source))
        wanted = recipe.budget.tasks_per_iteration
        if recipe.budget.iterations and wanted > len(table):
            raise UserError(
                f"budget.tasks_per_iteration: the training split has {len(table)} tasks, fewer than {wanted}"
            )
        self.tasks = TrainingTasks(
            table,
            seed=recipe.seed,
            first=recipe.warm_start_tasks,
            per_iteration=wanted,
            iterations=recipe.budget.iterations,
        )

    def _begin(self) -> tuple[Learner, int]:
        """The learner where it was left, or after the warm start; and the number of iterations that are done."""
        if self.policy.adapter is not None and self.recipe.warm_start and self.algorithm.kl.kind != "none":
            self.observer.note("the KL term's reference is the model without its adapter, as before the warm start")
        if self.recipe.overlap.kind == "one_step_off" and self.algorithm.correction.kind == "none":
            self.observer.note("what is learned from was sampled by weights one step older, and nothing corrects that")
        latest = self.processes.lead(self.checkpoints.latest)
        done = None if latest is None else int(latest.extra["iteration"])
        self.processes.lead(lambda: self.log.begin(done))
        if latest is None:
            for stage in range(len(self.recipe.warm_start)):
                self._warm_start(stage)
            learner = Learner(self.policy, self.algorithm)
            self._save(learner, 0, None)
        else:
            learner = Learner(self.policy, self.algorithm)
            self.checkpoints.restore(learner, latest)
            self.observer.note(f"going on after iteration {done}")
        self.version = str(learner.updates)
        return learner, done or 0

    def _warm_start(self, stage: int) -> None:
        config, tally = self.recipe.sft_config(stage), Tally()
        name = "warm start" if len(self.recipe.warm_start) == 1 else f"warm start {stage + 1}"
        with self.times.phase("expert"):
            episodes = self.processes.lead(lambda: self.episodes.expert(stage, tally))
        self.observer.note(f"{name}: the expert solved {tally.success:.0%} of {len(episodes)} training tasks")
        self.observer.stage(name, config.updates)
        with self.times.phase("warm_start"):
            kept = [episode for episode in episodes if self.outcomes[episode.outcome].train]
            report = sft(self.policy, kept, config, progress=self.observer.advance)
        self.processes.lead(lambda: self.log.add({"iteration": 0, "warm_start": report.to_dict()}))
        self.observer.note(f"{name}: {report.accuracy:.1%} of the expert's tokens are the most likely ones")

    def _iterate(self, learner: Learner, iteration: int) -> None:
        """A lot of rollouts, and what is learned from it."""
        recipe = self.recipe
        lot = self._lot(learner, iteration)
        overlaps = recipe.overlap.kind != "none"
        with self.times.phase("update"):
            if not overlaps:
                self.processes.lead(lambda: run_blocking(self.sync.before_update()))
            report = learner.update(lot.learned, self.outcomes)
            if not overlaps:
                self.processes.lead(lambda: run_blocking(self.sync.after_update()))
        self.version, self.published = str(learner.updates), None
        if recipe.overlap.publishes_in_flight:
            self._publish()
        elif overlaps:
            with self.times.phase("rollout"):
                self.processes.lead(lambda: self.lots.join())  # weights change when nothing is in flight
        every = recipe.evaluation.every
        validation: Evaluation | None = None
        if every and iteration % every == 0:
            validation = self._evaluate("validation", recipe.evaluation.validation_tasks, iteration)
        score = validation.success if validation else None

        def tell() -> None:
            row: dict[str, Any] = {"iteration": iteration, **rollout_metrics(lot.played), **lot.metrics}
            row |= {**report.metrics, **self.times.lap(), **memory_metrics(self.policy.device)}
            row |= throughput_metrics(row)
            if validation is not None:
                row["validation_success"] = score
            self.log.iteration(iteration, row)

        self.processes.lead(tell)
        due = score is not None or iteration % recipe.checkpoint.every == 0
        if due or iteration == recipe.budget.iterations:
            self._save(learner, iteration, score)

    def _lot(self, learner: Learner, iteration: int) -> Lot:
        """The rollouts of an iteration, played now or ahead of it."""
        self._publish()

        def take() -> Lot:
            self.lots.begin(iteration)
            self.episodes.watch(iteration)
            try:
                return run_blocking(self.episodes.freshen(self.lots.take(iteration), learner.updates))
            finally:
                self.episodes.watch(None)

        with self.times.phase("rollout"):
            return self.processes.lead(take)

    def _publish(self) -> None:
        """Let the engine sample from the policy's weights, once it can sample."""
        if self.published is not None:
            return

        def open_engine() -> None:
            if not self.times.seconds.get("engine") and self.sync.waits_for:
                self.observer.stage(self.sync.waits_for, None)
            run_blocking(self.sync.open(self.observer.doing))

        with self.times.phase("engine"):
            self.processes.lead(open_engine)
        with self.times.phase("sync"):
            weights = self._gather(self.recipe, self.policy)
            self.processes.lead(lambda: run_blocking(self.sync.publish(self.version, weights)))
        self.published = self.version

    def _evaluate(self, phase: str, tasks: int, iteration: int) -> Evaluation | None:
        """Play a held-out split by the weights of now. None where no tasks are wanted."""
        if tasks == 0:
            return None
        self._publish()
        with self.times.phase("evaluation"):
            return self.processes.lead(lambda: self.episodes.evaluate(phase, tasks, iteration))

    def _save(self, learner: Learner, iteration: int, score: float | None) -> None:
        with self.times.phase("checkpoint"):
            self.processes.lead(lambda: self.episodes.store.flush())
            latest = self.processes.lead(self.checkpoints.latest)
            if score is None and latest is not None and latest.update == learner.updates:
                score = latest.score  # the same weights: no group had a signal since they were measured
            self.checkpoints.save(learner, tokenizer=self.tokenizer, score=score, extra={"iteration": iteration})

    def _conclude(
        self,
        final: Checkpoint,
        before: Evaluation | None,
        after: Evaluation | None,
        before_greedy: Evaluation | None,
        after_greedy: Evaluation | None,
    ) -> TrainingResult:
        rows = list(self.folder.metrics())
        result = TrainingResult(
            success_before=before.success if before else None,
            success_after=after.success if after else None,
            greedy_before=before_greedy.success if before_greedy else None,
            greedy_after=after_greedy.success if after_greedy else None,
            held_out_tasks=after.tasks if after else 0,
            updates=final.update,
            iterations=self.recipe.budget.iterations,
            outcomes=count_outcomes(rows),
            best_iteration=int(final.extra["iteration"]),
            seed=self.recipe.seed,
            wall_s=time.time() - self.folder.started_at,
            seconds=dict(self.times.seconds),
            model=str(final.model_path),
            totals=run_totals(rows),
            alarms=tuple(self.log.alarms),
        )
        self.folder.write_summary(result.to_dict())
        draw_curve(self.folder.path / "curve.png", rows, result.success_before, result.success_after)
        self.log.close(result.to_dict())
        return result
