"""One attempt at one task: its steps, how it ended, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgym.record.outcome import Outcome
from stepgym.record.step import Step


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """Which attempt this is. `phase`, `iteration` and `task_id` name its group.

    Attributes:
        phase: What it was made for: `train`, `validation`, `test`, `expert`, `rollout`, `eval`.
        iteration: Number of the batch in a training run; 0 elsewhere.
        task_id: The task's id.
        sample: Index of the rollout within its group.
        attempt: 0 for the first try; a retry after a failure counts up.
    """

    phase: str
    iteration: int
    task_id: str
    sample: int
    attempt: int = 0

    @property
    def group(self) -> tuple[str, int, str]:
        """`(phase, iteration, task_id)`: what the samples of one task in one batch share."""
        return (self.phase, self.iteration, self.task_id)

    def __str__(self) -> str:
        return f"{self.phase}/{self.iteration}/{self.task_id}/{self.sample}/{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryId:
        """Read what `str` wrote. The task id may hold slashes. Raises `ValueError` for anything else."""
        phase, iteration, rest = text.split("/", 2)
        task_id, sample, attempt = rest.rsplit("/", 2)
        return cls(phase, int(iteration), task_id, int(sample), int(attempt))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One attempt at one task.

    Attributes:
        id: Which attempt this is.
        outcome: Why it ended.
        outcome_detail: One line about it: the exception's text, the limit that was hit.
        final: Whether this attempt stands. Exactly one attempt per sample is final; the others are stored, never
            counted.
        steps: The model turns, in the order they were sampled (conversations may interleave).
        reward: Sum of all rewards, raw as the environment gave them; None where the episode could not be scored.
        reward_parts: Named parts, summed over the episode.
        success: Whether the task was solved, as the environment says; None where it could not be scored.
        task: The task as JSON (`id`, `prompt`, `answer`, `data`).
        tools: JSON schemas of the tools that were offered.
        env_id, env_config: How to make the same environment again.
        reward_range: (low, high) of the environment.
        seeds: `env` and `sampler` seeds by name.
        error: Traceback of what failed, for people; empty where nothing did.
        metrics: Numbers about the episode (`turns`, `response_tokens`, `wall_s`, ...).
        provenance: Model, template digest, config digest, versions.
        started_at: Unix time in seconds.
    """

    id: TrajectoryId
    outcome: Outcome
    outcome_detail: str = ""
    final: bool = True
    steps: Sequence[Step] = ()
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None
    task: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    env_id: str = ""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    reward_range: tuple[float, float] = (0.0, 1.0)
    seeds: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
