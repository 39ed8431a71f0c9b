"""Why an episode ended, whose fault that was, and what training does about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from stepgym.errors import UserError


class Fault(StrEnum):
    """Whose fault an outcome is. Only `none` and `agent` may ever become reward by default."""

    NONE = "none"
    AGENT = "agent"
    BUDGET = "budget"
    ENVIRONMENT = "environment"
    INFRASTRUCTURE = "infrastructure"


class Outcome(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    TURN_LIMIT = "turn_limit"
    MALFORMED_ACTION = "malformed_action"
    RESPONSE_TRUNCATED = "response_truncated"
    CONTEXT_OVERFLOW = "context_overflow"
    EPISODE_TIMEOUT = "episode_timeout"
    AGENT_ERROR = "agent_error"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    CANCELLED = "cancelled"

    @property
    def fault(self) -> Fault:
        """Whose fault this outcome is (DESIGN 4, Outcome)."""
        return _FAULTS[self]

    @property
    def scored(self) -> bool:
        """Whether the episode says something about the agent: true for no fault, agent and budget faults."""
        return self.fault in (Fault.NONE, Fault.AGENT, Fault.BUDGET)


_FAULTS = {
    Outcome.COMPLETED: Fault.NONE,
    Outcome.TURN_LIMIT: Fault.AGENT,
    Outcome.MALFORMED_ACTION: Fault.AGENT,
    Outcome.RESPONSE_TRUNCATED: Fault.AGENT,
    Outcome.CONTEXT_OVERFLOW: Fault.BUDGET,
    Outcome.EPISODE_TIMEOUT: Fault.BUDGET,
    Outcome.AGENT_ERROR: Fault.INFRASTRUCTURE,
    Outcome.ENV_ERROR: Fault.ENVIRONMENT,
    Outcome.ENV_TIMEOUT: Fault.ENVIRONMENT,
    Outcome.ENGINE_ERROR: Fault.INFRASTRUCTURE,
    Outcome.ENGINE_TIMEOUT: Fault.INFRASTRUCTURE,
    Outcome.CANCELLED: Fault.INFRASTRUCTURE,
}


@dataclass(frozen=True, slots=True)
class Treatment:
    """What training does with an episode that ended with a given outcome.

    Attributes:
        reward: `keep` the recorded reward, `lowest` (the low end of the environment's `reward_range`), or a number.
        train: Whether the episode is trained on. False masks it: it leaves its group as if it had never been drawn.
        retries: How many fresh attempts are made before the outcome stands.
        on_exhausted: What happens when it still stands after the retries: `drop` (the sample is not used) or
            `mask` (the same for training, but counted as masked). Only meaningful where `train` is false.
    """

    reward: Literal["keep", "lowest"] | float = "keep"
    train: bool = True
    retries: int = 0
    on_exhausted: Literal["drop", "mask"] = "drop"

    def __post_init__(self) -> None:
        number = isinstance(self.reward, int | float) and not isinstance(self.reward, bool)
        if not number and self.reward not in ("keep", "lowest"):
            raise UserError(f"Treatment.reward must be 'keep', 'lowest' or a number, not {self.reward!r}")
        if self.on_exhausted not in ("drop", "mask"):
            raise UserError(f"Treatment.on_exhausted must be 'drop' or 'mask', not {self.on_exhausted!r}")
        if not isinstance(self.train, bool):
            raise UserError(f"Treatment.train must be true or false, not {self.train!r}")
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise UserError(f"Treatment.retries must be a whole number, 0 or more, not {self.retries!r}")


def _default_treatments() -> dict[Outcome, Treatment]:
    keep = Treatment()
    masked = Treatment(train=False, on_exhausted="mask")
    retried = Treatment(train=False, retries=2, on_exhausted="drop")
    return {
        Outcome.COMPLETED: keep,
        Outcome.TURN_LIMIT: keep,
        Outcome.MALFORMED_ACTION: Treatment(reward="lowest"),
        Outcome.RESPONSE_TRUNCATED: keep,
        Outcome.CONTEXT_OVERFLOW: masked,
        Outcome.EPISODE_TIMEOUT: masked,
        Outcome.AGENT_ERROR: retried,
        Outcome.ENV_ERROR: retried,
        Outcome.ENV_TIMEOUT: retried,
        Outcome.ENGINE_ERROR: retried,
        Outcome.ENGINE_TIMEOUT: retried,
        Outcome.CANCELLED: Treatment(train=False),
    }


_LIMITS = ("max_infrastructure_share", "window", "max_dropped_share")


@dataclass(frozen=True)
class OutcomePolicy:
    """Maps each outcome to its treatment; the table of DESIGN 4 is the default.

    Attributes:
        treatments: One `Treatment` per outcome.
        max_infrastructure_share: A run stops when more than this share of the last `window` attempts ended with an
            infrastructure fault.
        window: Number of attempts that share is taken over.
        max_dropped_share: A training run stops when, after all retries, more than this share of the episodes of one
            iteration (or of one evaluation) failed by environment or infrastructure: what is left says too little,
            and of the wrong episodes (those that never needed what is broken).
    """

    treatments: Mapping[Outcome, Treatment] = field(default_factory=_default_treatments)
    max_infrastructure_share: float = 0.2
    window: int = 100
    max_dropped_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("max_infrastructure_share", "max_dropped_share"):
            share = getattr(self, name)
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
                raise UserError(f"outcomes.{name} must be a number from 0 to 1, not {share!r}")
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise UserError(f"outcomes.window must be a whole number, 1 or more, not {self.window!r}")

    def __getitem__(self, outcome: Outcome) -> Treatment:
        return self.treatments[outcome]

    def loses(self, outcome: Outcome) -> bool:
        """Whether an episode with this outcome failed by environment or infrastructure, and is not trained on."""
        return not outcome.scored and not self[outcome].train

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None = None) -> OutcomePolicy:
        """Build a policy from `{outcome: {field: value}}`, over the defaults.

        Also takes `max_infrastructure_share`, `window` and `max_dropped_share`. Raises `UserError` for an unknown
        outcome or field.
        """
        config = dict(config or {})
        limits = {key: config.pop(key) for key in _LIMITS if key in config}
        treatments = _default_treatments()
        for name, changes in config.items():
            if name not in set(Outcome):
                raise UserError(f"outcomes: unknown outcome {name!r}; known: {', '.join(Outcome)}")
            if not isinstance(changes, Mapping):
                raise UserError(f"outcomes.{name}: expected a mapping such as {{train: false}}, got {changes!r}")
            try:
                treatments[Outcome(name)] = replace(treatments[Outcome(name)], **changes)
            except TypeError:
                known = ", ".join(Treatment.__dataclass_fields__)
                raise UserError(f"outcomes.{name}: unknown field in {dict(changes)!r}; known: {known}") from None
            except UserError as error:
                raise UserError(f"outcomes.{name}: {error}") from None
        return cls(treatments=treatments, **limits)

    def to_dict(self) -> dict[str, Any]:
        """A mapping that `from_config` reads back."""
        table: dict[str, Any] = {
            str(outcome): {
                "reward": treatment.reward,
                "train": treatment.train,
                "retries": treatment.retries,
                "on_exhausted": treatment.on_exhausted,
            }
            for outcome, treatment in self.treatments.items()
        }
        return {**table, **{name: getattr(self, name) for name in _LIMITS}}
