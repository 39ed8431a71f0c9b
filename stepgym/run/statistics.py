"""What an evaluation says: means, pass@k, intervals over tasks, and whether a difference is larger than chance.

Episodes of one task are not independent of each other, so tasks are the unit everywhere: a mean is the mean over tasks
of each task's own mean, an interval resamples tasks, a comparison pairs by task. Masks are for training; here an
episode that ended by the agent's fault or on its budget counts (unscored = 0), and one that ended by a fault of the
environment or of the infrastructure says nothing about the agent: it is excluded, and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.resampling import Interval, bootstrap_interval, pass_at_all

MAX_FAILED_SHARE = 0.02
"""Above this share of failed episodes (environment and infrastructure, after retries) a result is incomplete."""

UNSCORABLE = "unscorable"
"""The key under which `Evaluation.excluded` counts the episodes of unscorable tasks."""

_UNSCORABLE_DETAIL = "unscorable task"  # how `Episode` begins the outcome's detail for an `UnscorableTask`


@dataclass(frozen=True, slots=True)
class TaskScore:
    """What one task's scored episodes came to.

    Attributes:
        episodes: Scored episodes, 1 or more.
        successes: How many of them solved the task.
        reward: Their mean reward.
        digest: Identifies the task's answer and data, so that two tasks which merely share an id are not paired.
    """

    episodes: int
    successes: int
    reward: float
    digest: str = ""

    @property
    def success(self) -> float:
        """The share of episodes that solved the task."""
        return self.successes / self.episodes


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation. Every mean is over tasks; intervals are 95 % bootstrap intervals over tasks.

    Attributes:
        mean_reward: Mean over tasks of each task's mean reward; None where nothing was scored.
        ci95: (low, high) of `mean_reward`; None with fewer than two tasks.
        success: Mean over tasks of each task's share of solved episodes. The same number as `pass_at[1]`.
        success_ci95: (low, high) of `success`; None with fewer than two tasks.
        pass_at: Unbiased estimate of the chance that at least one of k samples solves a task (Chen et al. 2021,
            "Evaluating Large Language Models Trained on Code", equation 1), averaged over the tasks that have at
            least k scored episodes, for every k up to the largest number of episodes of a task.
        pass_at_tasks: How many tasks that is, for each k. Fewer than `tasks` where failures left a task short.
        episodes: Scored episodes.
        tasks: Tasks with at least one scored episode.
        outcomes: Number of final episodes by outcome, excluded ones too: sums to `episodes` + all of `excluded`.
        excluded: Episodes left out, by outcome; those of unscorable tasks under `unscorable`.
        unscorable_tasks: Ids of the tasks that cannot be scored, sorted.
        missing: Episodes that were asked for and have no final trajectory (the run was interrupted).
        failed_attempts: Attempts that failed and were tried again, by outcome.
        incomplete: Whether more than 2 % of the episodes failed or are missing. Unscorable ones are not failures.
        turns: Model turns in the scored episodes.
        turns_mean: Turns per scored episode.
        prompt_tokens: Prompt tokens sent, summed over turns: what an endpoint bills.
        response_tokens: Tokens sampled.
        prompt_tokens_mean, response_tokens_mean: The same per scored episode.
        statuses: Turns by status (`ok`, `no_action`, `malformed`, `truncated`).
        action_errors: Turns that the environment answered with an error, whatever their status.
        action_error_rate: `action_errors` per turn; None where the steps were not read.
        malformed_rate: Turns with the status `malformed`, per turn; None where the steps were not read.
        wall_s: Seconds of wall time.
        env_id: The environment.
        per_task: One score per task. Not part of `to_dict`; the trajectory store has it all.
    """

    mean_reward: float | None
    ci95: Interval | None
    success: float | None
    success_ci95: Interval | None
    pass_at: Mapping[int, float]
    pass_at_tasks: Mapping[int, int]
    episodes: int
    tasks: int
    outcomes: Mapping[str, int]
    excluded: Mapping[str, int]
    unscorable_tasks: tuple[str, ...]
    missing: int
    failed_attempts: Mapping[str, int]
    incomplete: bool
    turns: int
    turns_mean: float | None
    prompt_tokens: int
    prompt_tokens_mean: float | None
    response_tokens: int
    response_tokens_mean: float | None
    statuses: Mapping[str, int]
    action_errors: int
    action_error_rate: float | None
    malformed_rate: float | None
    wall_s: float
    env_id: str = ""
    per_task: Mapping[str, TaskScore] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything but `per_task`, ready for `json.dumps`: intervals as lists, the k of pass@k as text."""
        table: dict[str, Any] = {}
        for name in (each.name for each in fields(self) if each.name != "per_task"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                value = {str(key): count for key, count in value.items()}
            table[name] = list(value) if isinstance(value, tuple) else value
        return table


@dataclass(frozen=True, slots=True)
class EpisodeScore:
    """What the statistics need of one trajectory: small enough to keep for every episode of a long evaluation."""

    id: TrajectoryId
    final: bool
    outcome: Outcome
    unscorable: bool
    reward: float
    success: bool
    reward_range: tuple[float, float]
    turns: int
    statuses: tuple[str, ...]
    action_errors: int
    prompt_tokens: int
    response_tokens: int
    started_at: float
    ended_at: float
    env_id: str
    digest: str

    @classmethod
    def of(cls, trajectory: Trajectory) -> EpisodeScore:
        """Read one trajectory. A reward or success that is None (the episode was not scored) counts as 0.

        For a trajectory that was read without its steps, turns and tokens come from its metrics; what its turns'
        statuses were is then unknown.
        """
        steps, metrics = trajectory.steps, trajectory.metrics
        return cls(
            id=trajectory.id,
            final=trajectory.final,
            outcome=trajectory.outcome,
            unscorable=is_unscorable(trajectory),
            reward=0.0 if trajectory.reward is None else float(trajectory.reward),
            success=bool(trajectory.success),
            reward_range=trajectory.reward_range,
            turns=len(steps) or int(metrics.get("steps", 0)),
            statuses=tuple(step.status for step in steps),
            action_errors=sum(_had_action_error(step) for step in steps),
            prompt_tokens=sum(_tokens(step, "prompt") for step in steps) or int(metrics.get("prompt_tokens", 0)),
            response_tokens=sum(_tokens(step, "response") for step in steps) or int(metrics.get("response_tokens", 0)),
            started_at=trajectory.started_at,
            ended_at=trajectory.started_at + float(metrics.get("wall_s", 0.0)),
            env_id=trajectory.env_id,
            digest=_task_digest(trajectory.task),
        )


def is_unscorable(trajectory: Trajectory) -> bool:
    """Whether the environment said that the task itself cannot be scored, by raising `UnscorableTask`."""
    return trajectory.outcome is Outcome.ENV_ERROR and trajectory.outcome_detail.startswith(_UNSCORABLE_DETAIL)


def summarize(
    trajectories: Iterable[Trajectory | EpisodeScore],
    *,
    expected: int | None = None,
    wall_s: float | None = None,
    seed: int = 0,
    resamples: int = 10_000,
) -> Evaluation:
    """Turn the trajectories of an evaluation into its result.

    Args:
        trajectories: In any order, read once and not kept. Those that are not final are counted, nothing more.
        expected: Number of episodes that were asked for, where that is known; those that are not there are `missing`.
        wall_s: Seconds of wall time; None takes the time from the first start to the last end.
        seed: Seeds the resampling.
        resamples: Number of bootstrap resamples.

    Raises:
        UserError: The trajectories are of more than one phase, iteration or environment, or two final ones are of the
            same sample.
    """
    scores = [each if isinstance(each, EpisodeScore) else EpisodeScore.of(each) for each in trajectories]
    finals = [score for score in scores if score.final]
    _check_one_evaluation(finals)

    unscorable = {score.id.task_id for score in finals if score.unscorable}
    scored: list[EpisodeScore] = []
    excluded: Counter[str] = Counter()
    for score in finals:
        if score.id.task_id in unscorable:
            excluded[UNSCORABLE] += 1
        elif not score.outcome.scored:
            excluded[str(score.outcome)] += 1
        else:
            scored.append(score)

    missing = max(0, (expected or 0) - len(finals))
    failures = missing + sum(count for name, count in excluded.items() if name != UNSCORABLE)
    per_task = _per_task(scored)
    rewards = np.array([task.reward for task in per_task.values()])
    success = np.array([task.success for task in per_task.values()])
    lows, highs = zip(*(score.reward_range for score in scored), strict=True) if scored else ((0.0,), (1.0,))
    pass_at, pass_at_tasks = pass_at_all(
        np.array([task.episodes for task in per_task.values()], dtype=np.int64),
        np.array([task.successes for task in per_task.values()], dtype=np.int64),
    )
    statuses = Counter(status for score in scored for status in score.statuses)
    turns = sum(score.turns for score in scored)
    prompt_tokens = sum(score.prompt_tokens for score in scored)
    response_tokens = sum(score.response_tokens for score in scored)
    action_errors = sum(score.action_errors for score in scored)
    return Evaluation(
        mean_reward=_mean(rewards),
        ci95=bootstrap_interval(rewards, bounds=(min(lows), max(highs)), seed=seed, resamples=resamples),
        success=_mean(success),
        success_ci95=bootstrap_interval(success, bounds=(0.0, 1.0), seed=seed, resamples=resamples),
        pass_at=pass_at,
        pass_at_tasks=pass_at_tasks,
        episodes=len(scored),
        tasks=len(per_task),
        outcomes=_counts(str(score.outcome) for score in finals),
        excluded=_counts(excluded.elements()),
        unscorable_tasks=tuple(sorted(unscorable)),
        missing=missing,
        failed_attempts=_counts(str(score.outcome) for score in scores if not score.final),
        incomplete=failures > MAX_FAILED_SHARE * (len(scored) + failures),
        turns=turns,
        turns_mean=_ratio(turns, len(scored)),
        prompt_tokens=prompt_tokens,
        prompt_tokens_mean=_ratio(prompt_tokens, len(scored)),
        response_tokens=response_tokens,
        response_tokens_mean=_ratio(response_tokens, len(scored)),
        statuses=_counts(statuses.elements()),
        action_errors=action_errors,
        action_error_rate=_ratio(action_errors, statuses.total()),
        malformed_rate=_ratio(statuses["malformed"], statuses.total()),
        wall_s=_wall_seconds(scores) if wall_s is None else float(wall_s),
        env_id=finals[0].env_id if finals else "",
        per_task=per_task,
    )


def _check_one_evaluation(finals: Sequence[EpisodeScore]) -> None:
    sources = sorted({(score.id.phase, score.id.iteration, score.env_id) for score in finals})
    if len(sources) > 1:
        named = "; ".join(
            f"phase {phase}, iteration {iteration}, {env or 'no env'}" for phase, iteration, env in sources[:3]
        )
        raise UserError(f"an evaluation is of one phase, iteration and environment; these trajectories are of {named}")
    counts = Counter((score.id.group, score.id.sample) for score in finals)
    if counts and max(counts.values()) > 1:
        (group, sample), times = counts.most_common(1)[0]
        raise UserError(f"task {group[2]!r}, sample {sample} has {times} final trajectories; a sample has exactly one")


def _per_task(scored: Iterable[EpisodeScore]) -> dict[str, TaskScore]:
    groups: dict[str, list[EpisodeScore]] = {}
    for score in scored:
        groups.setdefault(score.id.task_id, []).append(score)
    return {
        task_id: TaskScore(
            episodes=len(group),
            successes=sum(score.success for score in group),
            reward=float(np.mean([score.reward for score in group])),
            digest=group[0].digest,
        )
        for task_id, group in sorted(groups.items())
    }


def _had_action_error(step: Step) -> bool:
    return step.status in ("no_action", "malformed") or bool(step.metrics.get("action_error"))


def _tokens(step: Step, side: str) -> int:
    """Tokens of the prompt or the response; where an engine speaks only chat, as many as it says it used."""
    ids = step.prompt_ids if side == "prompt" else step.response_ids
    return len(ids) if ids is not None else int(step.metrics.get(f"{side}_tokens", 0))


def _task_digest(task: Mapping[str, Any]) -> str:
    # The prompt is left out: comparing two prompts for the same tasks is a fair comparison.
    content = json.dumps([task.get("answer"), task.get("data") or {}], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _wall_seconds(scores: Sequence[EpisodeScore]) -> float:
    if not scores:
        return 0.0
    return max(score.ended_at for score in scores) - min(score.started_at for score in scores)


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Counts by name, the most frequent first, names in order where counts are equal."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
