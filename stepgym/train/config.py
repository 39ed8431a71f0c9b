"""The config of a learner: which algorithm, with which settings. What cannot work is refused when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from stepgym.config import validate_kwargs
from stepgym.credit import CREDITS
from stepgym.credit.level import level
from stepgym.errors import UserError
from stepgym.plugins import Registry, unknown
from stepgym.train.corrections import CORRECTIONS
from stepgym.train.critic_config import CriticConfig
from stepgym.train.losses import KLS, LOSSES
from stepgym.train.losses.reduction import ReductionConfig
from stepgym.train.losses.tokens import Tokens, unit_of
from stepgym.train.optimizer import OptimizerConfig

WHOLE_UNITS = ("token", "step")
"""Units that no cut into micro-batches parts."""


class Choice(BaseModel):
    """A function picked by name, with its options: `{kind: grpo, scale_by_std: false}`, or just `grpo`.

    Attributes:
        kind: Its name in the registry, or `module:function`. The other fields are its keyword-only parameters.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given."""
        return dict(self.model_extra or {})

    @classmethod
    def read(cls, value: Any, registry: Registry[Any], where: str, none: bool = False) -> Choice:
        """Check a name or a mapping against a registry. Raises `UserError` in one line that begins with `where`.

        Args:
            value: What was given.
            registry: The names that are known.
            where: Name of the field.
            none: Whether `none` is a name too.
        """
        if isinstance(value, Choice):
            value = value.model_dump()
        if value is None and none:
            value = "none"
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
            raise UserError(f"{where}: expected a name or a mapping with 'kind', got {value!r}")
        options = {name: option for name, option in value.items() if name != "kind"}
        kind = value["kind"]
        if none and kind == "none":
            if options:
                raise UserError(f"{where}: {next(iter(options))!r} has no effect with kind 'none'")
            return cls(kind=kind)
        if none and kind not in registry and ":" not in kind:
            raise UserError(f"{where}: {unknown(registry.noun, kind, [*registry.names(), 'none'])}")
        function = registry.get(kind)
        return cls(kind=kind, **validate_kwargs(function, options, where))


class KLConfig(BaseModel):
    """A KL term, to a frozen reference: the weights that training began with, under LoRA the model without its adapter.

    Attributes:
        kind: `none`, or an estimator: `k1`, `k2`, `k3` (see `stepgym.train.losses.kl`).
        coef: Its weight.
        applies_to: `loss`: the estimate at each token is added to its loss, with gradient. `reward`: its sum over a
            step's tokens, under the weights before the batch's first update, is taken from the step's reward before
            credit is assigned.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "k1", "k2", "k3"] = "none"
    coef: float = Field(default=0.001, ge=0)
    applies_to: Literal["loss", "reward"] = "loss"

    @model_validator(mode="after")
    def _used(self) -> KLConfig:
        if self.kind == "none":
            for name in ("coef", "applies_to"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name!r} has no effect with kind 'none'; kinds: {', '.join(KLS)}")
        if self.kind == "k1" and self.applies_to == "loss":
            raise ValueError("k1 in the loss has a gradient of zero on average; use k2 or k3, or applies_to: reward")
        return self


class LearnerConfig(BaseModel):
    """How a batch of trajectories becomes updates.

    Attributes:
        credit: Rewards to advantages; names in `stepgym.credit.CREDITS`.
        loss: Loss per token; names in `stepgym.train.losses.LOSSES`.
        critic: What predicts values for credit by token (`gae`); see `stepgym.train.critic_config.CriticConfig`. There
            for such a credit and for no other.
        kl: A KL term in the loss or in the reward.
        correction: Weights for the gap between sampler and trainer; names in `CORRECTIONS`, or `none`. With `none`
            the sampler's logprobs are not used, so what they mean is not checked either.
        reduction: What the loss is a mean over: `token`, `step`, `trajectory`, `group`, `{kind: constant, tokens: N}`.
            Over a whole update.
        mini_batches: Updates per batch and epoch. Each takes whole groups; they are formed before groups without
            signal are dropped, so their number depends on groups only.
        epochs: Passes over each batch.
        zero_variance: `drop` groups whose rewards are equal, which have no signal, or `keep` them (for the sake of a
            KL term).
        optimizer: AdamW, clipping, schedule.
        total_updates: Number of updates that the schedule is laid out for; needed where the learning rate decays.
        entropy: Whether to measure the policy's entropy.
        seed: Decides which groups share a mini-batch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    credit: Choice = Choice(kind="grpo")
    critic: CriticConfig | None = None
    loss: Choice = Choice(kind="ppo")
    kl: KLConfig = KLConfig()
    correction: Choice = Choice(kind="truncated")
    reduction: ReductionConfig = ReductionConfig()
    mini_batches: int = Field(default=1, ge=1)
    epochs: int = Field(default=1, ge=1)
    zero_variance: Literal["drop", "keep"] = "drop"
    optimizer: OptimizerConfig = OptimizerConfig()
    total_updates: int | None = Field(default=None, gt=0)
    entropy: bool = True
    seed: int = 0

    @field_validator("credit", mode="before")
    @classmethod
    def _credit(cls, value: Any) -> Choice:
        return Choice.read(value, CREDITS, "credit")

    @field_validator("loss", mode="before")
    @classmethod
    def _loss(cls, value: Any) -> Choice:
        return Choice.read(value, LOSSES, "loss")

    @field_validator("correction", mode="before")
    @classmethod
    def _correction(cls, value: Any) -> Choice:
        return Choice.read(value, CORRECTIONS, "correction", none=True)

    @field_validator("kl", mode="before")
    @classmethod
    def _kl(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _critic_where_one_is_needed(self) -> LearnerConfig:
        kind = self.credit.kind
        if not self.credit_by_token:
            if self.critic is not None:
                raise ValueError(
                    f"'critic' has no effect with credit {kind!r}, which needs no values; it goes with gae"
                )
            return self
        if self.critic is None:
            raise ValueError(
                f"credit {kind!r} needs a critic: add `critic: {{}}`, or use a credit without one, such as grpo, rloo "
                "or turn_returns"
            )
        if self.zero_variance == "keep":
            raise ValueError(f"'zero_variance' has no effect with credit {kind!r}: all groups are trained on")
        return self

    @property
    def credit_by_token(self) -> bool:
        """Whether each trained token gets an advantage of its own, from a critic's values."""
        return level(self.function("credit")) == "token"

    @property
    def critic_updates(self) -> int | None:
        """Number of updates that the critic's schedule is laid out for: its warm-up, and all of the policy's."""
        if self.total_updates is None or self.critic is None:
            return self.total_updates
        return self.total_updates + self.critic.warmup_batches * self.mini_batches * self.epochs

    @property
    def scored_before_credit(self) -> bool:
        """Whether credit needs log-probabilities: the KL is a part of the reward."""
        return self.kl.applies_to == "reward"

    @property
    def old_logprobs_needed(self) -> bool:
        """Whether pi_old has to be computed before the first update, and is not just the current log-probability.

        Because the weights move within a batch; because of the reward; or because a loss or a correction looks beyond
        a step, or changes denominators, and so needs the tokens of the whole update.
        """
        return (
            self.mini_batches > 1
            or self.epochs > 1
            or self.scored_before_credit
            or unit_of(self.function("loss"), self.loss.options) not in WHOLE_UNITS
            or self._correction_looks_far
        )

    @property
    def _correction_looks_far(self) -> bool:
        if self.correction.kind == "none":
            return False
        function, options = self.function("correction"), self.correction.options
        if unit_of(function, options) not in WHOLE_UNITS:
            return True
        try:
            return function(Tokens.none(), **options).keep is not None
        except Exception:  # one that cannot do without tokens may leave some out
            return True

    def function(self, field: Literal["credit", "loss", "correction"]) -> Callable[..., Any]:
        """The function that a field names."""
        registries: dict[str, Registry[Any]] = {"credit": CREDITS, "loss": LOSSES, "correction": CORRECTIONS}
        found: Callable[..., Any] = registries[field].get(getattr(self, field).kind)
        return found
