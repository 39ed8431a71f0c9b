"""The config of a critic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from stepgym.train.optimizer import OptimizerConfig


class CriticConfig(BaseModel):
    """A model that predicts the rewards still to come, for credit by token.

    Device, types, layout, kernels and adapter are the policy's (`policy` of a recipe): under LoRA the critic, too, is
    a frozen model with an adapter of its own.

    Attributes:
        path: A model of `transformers` that it begins with, a reward model say: a folder or a hub name. Its vocabulary
            must be the policy's. null: a copy of the policy as it is when reinforcement begins. The head is always new.
        optimizer: AdamW, clipping, schedule (`stepgym.train.optimizer.OptimizerConfig`). Critics are usually given
            ten times the policy's learning rate.
        clip: The loss stops pulling a value that moved further than this from what it was before the batch's first
            update (the value clipping of PPO); null for no limit.
        warmup_batches: Batches from which only the critic learns, before the policy begins.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    clip: float | None = Field(default=0.2, gt=0)
    warmup_batches: int = Field(default=0, ge=0)
