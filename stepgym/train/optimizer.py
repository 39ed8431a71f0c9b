"""AdamW with a learning rate that warms up and decays, shared by reinforcement learning and supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stepgym.errors import UserError


class OptimizerConfig(BaseModel):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), gradient clipping and the learning-rate schedule.

    Attributes:
        learning_rate: The highest learning rate.
        warmup_updates: Updates over which the learning rate rises linearly; the first update already moves.
        warmup_ratio: The same as a share of all updates; give one of the two.
        decay: `constant`, or `linear` or `cosine` down to `final_learning_rate` at the last update.
        final_learning_rate: Where the decay ends.
        betas: Decay of AdamW's averages of the gradient and of its square.
        eps: Added to AdamW's denominator.
        weight_decay: Decoupled weight decay of matrices and embeddings; vectors (norms, biases) are not decayed.
        max_grad_norm: Gradients are scaled down to this norm; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_updates: int = Field(default=0, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_learning_rate: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerConfig:
        if self.warmup_updates and self.warmup_ratio is not None:
            raise ValueError("'warmup_updates' and 'warmup_ratio' exclude each other")
        return self

    def warmup(self, total_updates: int | None) -> int:
        """Updates over which the learning rate rises. Raises `UserError` for a share of an unknown number."""
        if self.warmup_ratio is None:
            return self.warmup_updates
        if total_updates is None:
            raise UserError("warmup_ratio needs total_updates, the number of updates it is a share of")
        return round(self.warmup_ratio * total_updates)

    def learning_rate_at(self, update: int, total_updates: int | None = None) -> float:
        """Learning rate of update number `update` (from 0) of `total_updates`.

        Past the last update of a decay the rate stays where the decay ended.

        Raises:
            UserError: The rate decays, or warms up over a share of the updates, and `total_updates` is None.
        """
        warmup = self.warmup(total_updates)
        if update < warmup:
            return self.learning_rate * (update + 1) / (warmup + 1)
        if self.decay == "constant":
            return self.learning_rate
        if total_updates is None:
            raise UserError(f"decay {self.decay!r} needs total_updates, the number of updates it ends after")
        progress = (update - warmup) / max(1, total_updates - 1 - warmup)
        progress = min(1.0, progress)
        share = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_learning_rate + share * (self.learning_rate - self.final_learning_rate)


class Optimizer:
    """AdamW over a model's parameters, the clipping and the schedule. Counts the updates it makes.

    Args:
        parameters: What is trained.
        config: See `OptimizerConfig`.
        total_updates: The number of updates the schedule is laid out for; None where it does not decay.

    Attributes:
        updates: Updates made so far. An update whose gradient was not finite is not made.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        config: OptimizerConfig,
        total_updates: int | None = None,
    ) -> None:
        config.learning_rate_at(config.warmup(total_updates), total_updates)  # refuse a schedule without an end now
        self.config = config
        self.total_updates = total_updates
        self.updates = 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        decayed = [parameter for parameter in self._parameters if parameter.ndim > 1]
        plain = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.config.learning_rate_at(self.updates, self.total_updates)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip, take one step and forget the gradients.

        Returns the norm of the gradient before clipping. Where it is not finite no step is taken.
        """
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self.updates += 1
        self.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on besides the weights. Tensors and plain values only."""
        return {"adamw": self._adamw.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was called. The schedule stays this optimizer's own."""
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({**state["adamw"], "param_groups": groups})
        self.updates = state["updates"]
