"""Whether rollouts go on while the policy is trained, and how old what they sampled may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stepgym.errors import UserError
from stepgym.record.trajectory import Trajectory

if TYPE_CHECKING:
    from stepgym.train.config import LearnerConfig


class OverlapConfig(BaseModel):
    """How rollouts and training overlap. The rollouts for one iteration of training are a *lot*.

    `none`: a lot is played when the one before has been learned from. What is trained on was sampled by the very
    weights that are trained.

    `one_step_off`: while the policy learns from a lot, the next one is played, by the weights of before. New weights
    reach the engine when no episode is in flight, so a trajectory comes from one version, and an interrupted run ends
    as an unbroken one.

    `async`: later lots are played all the time, and new weights reach the engine in flight, in the middle of episodes
    and responses (as in PipelineRL, arXiv:2509.19128). Which token comes from which weights depends on timing, so two
    such runs differ.

    Lots are consumed in the order in which they were started, each whole: taking the episodes that end first would
    favour short ones. What was sampled by other weights needs importance weights (`algorithm.correction`), from the
    sampler's own log-probabilities.

    Attributes:
        kind: `none`, `one_step_off` or `async`.
        lookahead: With `async`, lots that are played or wait beside the one that is learned from; null: 1.
        max_staleness: With `async`, most updates that may have been made since the oldest weights that sampled a token
            of a trajectory, when it is learned from. One over it is dropped, and another sample of its task is played
            in its place, by the weights of now. Null: no bound but that of `lookahead`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "one_step_off", "async"] = "none"
    lookahead: int | None = Field(default=None, ge=1)
    max_staleness: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _used(self) -> OverlapConfig:
        for name in ("lookahead", "max_staleness"):
            if self.kind != "async" and getattr(self, name) is not None:
                raise ValueError(f"{name!r} has no effect with kind {self.kind!r}, only with 'async'")
        return self

    @property
    def ahead(self) -> int:
        """Lots that are begun before they are needed."""
        return {"none": 0, "one_step_off": 1, "async": self.lookahead or 1}[self.kind]

    @property
    def publishes_in_flight(self) -> bool:
        """Whether new weights reach the engine while episodes are being played."""
        return self.kind == "async"


def check_overlap(config: OverlapConfig, algorithm: LearnerConfig) -> None:
    """Refuse what cannot work with an algorithm. Raises `UserError`."""
    if config.kind != "async":
        return
    if algorithm.correction.kind == "none":
        raise UserError(
            "overlap.kind: async learns from what other weights have sampled, and algorithm.correction: none would "
            "take it for the policy's own; choose a correction, as in algorithm.correction: truncated"
        )
    updates = algorithm.mini_batches * algorithm.epochs
    if config.max_staleness is not None and config.max_staleness < updates:
        raise UserError(
            f"overlap.max_staleness: {config.max_staleness} is less than the {updates} updates of one iteration "
            "(algorithm.mini_batches * algorithm.epochs): all that is played during an update would be dropped"
        )


def staleness(trajectory: Trajectory, updates: int) -> int | None:
    """Updates made since the oldest weights that sampled a token of a trajectory, of `updates` made so far.

    None where the record does not say: it has no step, or its engine does not number its weights.
    """
    versions = [
        int(version) for step in trajectory.steps for version, _, _ in step.weights_versions if _is_count(version)
    ]
    return max(0, updates - min(versions)) if versions else None


def staleness_metrics(trajectories: Sequence[Trajectory], updates: int) -> dict[str, float]:
    """`staleness_mean` and `staleness_max` of trajectories that are about to be learned from; empty where unknown."""
    known = [age for trajectory in trajectories if (age := staleness(trajectory, updates)) is not None]
    return {"staleness_mean": sum(known) / len(known), "staleness_max": float(max(known))} if known else {}


def _is_count(version: str) -> bool:
    return version.isascii() and version.isdigit()
