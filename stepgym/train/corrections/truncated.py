"""Truncated importance sampling, one ratio per token."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.corrections.gap import sampler_log_ratio
from stepgym.train.losses.tokens import Tokens, TokenWeights, couples


@couples("token")
def truncated(tokens: Tokens, *, cap: Annotated[float, Field(gt=0)] = 2.0) -> TokenWeights:
    """Truncated importance sampling per token: weight = min(pi_old / mu, cap).

    pi_old is the trainer's own log-probability before the batch's first update, mu the sampler's as recorded. They
    differ by numerics, and by the weights when these moved on while the episode ran. A token without a comparable mu
    has weight 1.

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training
    (https://fengyao.notion.site/off-policy-rl); truncation: Ionides 2008, Truncated importance sampling.

    Args:
        tokens: The trained tokens.
        cap: The largest weight.
    """
    log_ratio, known = sampler_log_ratio(tokens)
    ratio = torch.exp(log_ratio)
    weights = torch.where(known, torch.clamp(ratio, max=cap), torch.ones_like(ratio))
    metrics = {
        "importance_weight": weights,
        "importance_truncated": known & (ratio > cap),
        "importance_missing": ~known,
    }
    return TokenWeights(weights, metrics=metrics)
