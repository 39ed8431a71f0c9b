"""Weights for tokens whose sampler did not quite agree with the trainer."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.losses.tokens import TokenLoss, Tokens, ratio_of


def truncated(tokens: Tokens, sampler_logprob: torch.Tensor, *, cap: Annotated[float, Field(gt=0)] = 2.0) -> TokenLoss:
    """Truncated importance sampling per token: weight = min(pi_old / mu, cap), without gradient.

    pi_old is the trainer's own log-probability before the batch's first update, mu the sampler's as recorded. They
    differ by numerics, and by the weights when these moved on while the episode ran.

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training
    (https://fengyao.notion.site/off-policy-rl); truncation: Ionides 2008, Truncated importance sampling.

    Args:
        tokens: The trained tokens.
        sampler_logprob: Tensor [M], log mu.
        cap: The largest weight.
    """
    ratio = ratio_of(tokens.old_logprob, sampler_logprob).detach()
    weights = torch.clamp(ratio, max=cap)
    return TokenLoss(weights, {"importance_weight": weights, "importance_truncated": ratio > cap})
