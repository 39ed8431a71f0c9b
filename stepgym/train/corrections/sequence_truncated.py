"""Truncated importance sampling, one ratio per sequence."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.corrections.gap import sampler_log_ratio
from stepgym.train.losses.tokens import MAX_LOG_RATIO, Tokens, TokenWeights
from stepgym.train.losses.units import SequenceUnit, sum_over


def sequence_truncated(
    tokens: Tokens, *, cap: Annotated[float, Field(gt=0)] = 2.0, unit: SequenceUnit = "step"
) -> TokenWeights:
    """Truncated importance sampling per sequence: weight = min(product of pi_old / mu over the unit, cap).

    All tokens of a unit have the same weight. The product is the importance ratio of the sequence as a whole, which is
    unbiased but for the cap, where a ratio per token is not; its variance grows with the length, and with it the share
    of units at the cap or near 0. A token without a comparable mu counts as a ratio of 1.

    Source: Liu & Li et al. 2025, When speed kills stability
    (https://richardli.xyz/post/rl-collapse-training-inference); truncation: Ionides 2008, Truncated importance
    sampling.

    Args:
        tokens: The trained tokens; of a unit, all or none.
        cap: The largest weight.
        unit: What a sequence is: one model turn, or all turns of a trajectory.
    """
    log_ratio, known = sampler_log_ratio(tokens)
    total = sum_over(log_ratio, tokens, unit)
    ratio = torch.exp(torch.clamp(total, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    weights = torch.clamp(ratio, max=cap)
    metrics = {
        "importance_weight": weights,
        "importance_truncated": ratio > cap,
        "importance_missing": ~known,
    }
    return TokenWeights(weights, metrics=metrics)
