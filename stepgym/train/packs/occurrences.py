"""Trained tokens: what the loss is taken over, whatever way the forward pass is laid out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.record.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """Where each trained token (an occurrence: a token of a step's response whose loss mask is 1) comes from.

    int64 arrays [M], by trajectory, then step, then token.

    Attributes:
        step: Number of the step within the batch, counted over all its steps.
        trajectory: Number of the trajectory within the batch.
        group: Number of the group within the batch.
        temperature: float32 [M] that the token was sampled at.
        sampler_logprob: float32 [M] of the sampler; NaN where absent or not comparable with the trainer's.
    """

    step: NDArray[np.int64]
    trajectory: NDArray[np.int64]
    group: NDArray[np.int64]
    temperature: NDArray[np.float32]
    sampler_logprob: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.step)


def trained_mask(step: Step) -> NDArray[np.bool_]:
    """bool [R], which tokens of a step's response are trained."""
    assert step.loss_mask is not None  # checked by trained_positions
    mask = step.loss_mask.astype(bool)
    if step.logprobs is not None:
        # A token of probability zero was not sampled, whatever put it there: there is nothing to learn from it.
        mask &= step.logprobs != -np.inf
    return mask


def trained_positions(step: Step, where: str) -> NDArray[np.int64]:
    """int64 [K], where the trained tokens of a step stand in its prompt + response.

    Raises `UserError`, beginning with `where`, for a step without ids and for a trained token at position 0.
    """
    if step.prompt_ids is None or step.response_ids is None:
        raise UserError(f"{where}: it has no token ids (its engine speaks only chat), so it cannot be trained on")
    positions = len(step.prompt_ids) + np.flatnonzero(trained_mask(step))
    if len(positions) and positions[0] == 0:
        raise UserError(f"{where}: the prompt is empty, so nothing predicts the first token of the response")
    return positions


def comparable_logprobs(step: Step) -> NDArray[np.float32]:
    """float32 [R], the sampler's logprobs where they mean what the trainer's mean; NaN elsewhere."""
    assert step.response_ids is not None
    sampling = step.sampling
    if (
        step.logprobs is None
        or step.sampler != "policy"
        or sampling is None
        or sampling.logprobs_kind != "processed"
        or sampling.temperature <= 0
    ):
        return np.full(len(step.response_ids), np.nan, dtype=np.float32)
    return step.logprobs
