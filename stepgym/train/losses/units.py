"""Sums and means over the tokens of a step or of a trajectory, wherever these stand in a batch."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from stepgym.train.losses.tokens import Tokens

SequenceUnit: TypeAlias = Literal["step", "trajectory"]
"""What a sequence loss takes for a sequence. Never a merged sequence: that would depend on how steps merge."""


def sum_over(values: torch.Tensor, tokens: Tokens, unit: SequenceUnit) -> torch.Tensor:
    """At each token the sum of `values` ([M]) over its unit, [M]. The unit's tokens need not stand side by side."""
    _, index = torch.unique(tokens.step if unit == "step" else tokens.trajectory, return_inverse=True)
    totals = torch.zeros(len(index), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return totals[index]


def mean_over(values: torch.Tensor, tokens: Tokens, unit: SequenceUnit) -> torch.Tensor:
    """At each token the mean of `values` ([M]) over its unit, [M]."""
    return sum_over(values, tokens, unit) / sum_over(torch.ones_like(values), tokens, unit)
