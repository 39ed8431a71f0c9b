"""What a loss is given and what it returns: flat tensors with one entry per trained token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this of zero before they are exponentiated, so that none becomes infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Trained tokens (occurrences of a token in a step), in any order. All tensors are [M].

    Attributes:
        logprob: log-probability under the weights being trained, at sampling temperature; carries the gradient.
        old_logprob: The same under the weights before the first mini-batch of the batch; no gradient.
        advantage: Advantage of the token's step.
        step, trajectory, group: int64 index of the token's step, trajectory and group within the update: the units
            over which sequence losses are taken. Never a merged sequence.
    """

    logprob: torch.Tensor
    old_logprob: torch.Tensor
    advantage: torch.Tensor
    step: torch.Tensor
    trajectory: torch.Tensor
    group: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """A loss per token, before importance weights and reduction.

    Attributes:
        values: Tensor [M] with gradient.
        metrics: Tensors [M] without gradient (or bool), averaged over all trained tokens of a batch and logged.
    """

    values: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


LossFunction: TypeAlias = Callable[..., TokenLoss]
"""`loss(tokens: Tokens, *, options) -> TokenLoss`."""

KLFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`kl(logprob, reference_logprob) -> values`, all [M]."""

CorrectionFunction: TypeAlias = Callable[..., TokenLoss]
"""`correction(tokens: Tokens, sampler_logprob, *, options) -> TokenLoss`; its values [M] are weights, no gradient."""


def ratio_of(logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(logprob - other), the log-ratio held within `MAX_LOG_RATIO` of zero."""
    return torch.exp(torch.clamp(logprob - other, -MAX_LOG_RATIO, MAX_LOG_RATIO))
