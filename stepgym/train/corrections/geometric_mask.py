"""Sequences that drifted too far from their sampler are left out as a whole."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.corrections.gap import sampler_log_ratio
from stepgym.train.losses.tokens import Tokens, TokenWeights
from stepgym.train.losses.units import SequenceUnit, sum_over


def geometric_mask(
    tokens: Tokens,
    *,
    low: Annotated[float, Field(ge=0, lt=1)] = 0.99,
    high: Annotated[float, Field(gt=1)] | None = 1.01,
    cap: Annotated[float, Field(gt=0)] | None = 2.0,
    only_negative: bool = False,
    unit: SequenceUnit = "step",
) -> TokenWeights:
    """Mask by sequence: a unit is kept where low <= exp(mean of log(pi_old / mu)) <= high, else left out.

    The geometric mean does not grow with length, so one range serves short and long units. What is kept is weighed per
    token by min(pi_old / mu, cap), as in `truncated`. Tokens without a comparable mu do not count in the mean and have
    weight 1; a unit with none that counts is kept.

    The range has to fit the length of a unit: a mean over many tokens is steadier. 0.999 to 1.001 is usual for
    responses of thousands of tokens; turns of tens of tokens need more.

    Source: Liu & Li et al. 2025, When speed kills stability
    (https://richardli.xyz/post/rl-collapse-training-inference). `only_negative`, with `high` off, is the off-policy
    sequence masking of DeepSeek-V3.2 (arXiv:2512.02556, section 3.1, with delta = -log(low)), taken here between mu and
    pi_old, which do not change within a batch.

    Args:
        tokens: The trained tokens; of a unit, all or none.
        low: The smallest mean ratio that is kept; 0 for no bound.
        high: The largest mean ratio that is kept; None for no bound.
        cap: The largest weight of a token that is kept; None gives all of them weight 1.
        only_negative: Leave out only tokens with A < 0: being pushed away from what one would no longer do harms more
            than being drawn to it.
        unit: What a sequence is: one model turn, or all turns of a trajectory.
    """
    log_ratio, known = sampler_log_ratio(tokens)
    counted = sum_over(known.to(log_ratio.dtype), tokens, unit)
    mean = torch.exp(sum_over(log_ratio, tokens, unit) / torch.clamp(counted, min=1))
    keep = (mean >= low) & (mean <= (torch.inf if high is None else high))
    if only_negative:
        keep |= tokens.advantage >= 0
    ratio = torch.exp(log_ratio)
    weights = torch.ones_like(ratio) if cap is None else torch.where(known, torch.clamp(ratio, max=cap), 1.0)
    weights = torch.where(keep, weights, torch.zeros_like(ratio))
    metrics = {"importance_weight": weights, "importance_masked": ~keep, "importance_missing": ~known}
    if cap is not None:
        metrics["importance_truncated"] = keep & known & (ratio > cap)
    return TokenWeights(weights, keep, metrics)
