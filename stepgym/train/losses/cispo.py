"""Clipped importance-sampling weights: the ratio is clipped, no token's gradient is dropped."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.losses.tokens import TokenLoss, Tokens, couples, ratio_of


@couples("token")
def cispo(
    tokens: Tokens,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0,
    clip_high: Annotated[float, Field(gt=0)] = 4.0,
) -> TokenLoss:
    """CISPO: loss = -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log pi, ratio = pi / pi_old, sg = no gradient.

    REINFORCE with a clipped importance weight. Where PPO takes a token out of the update once its ratio has left the
    range, here it goes on with the weight at the range's edge; so rare tokens that an update makes likely are not lost.

    Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), section 3.1, equations 4 and 5. There the lower bound is
    switched off, as here by default, and the mean is over all tokens (`reduction: token`). The upper bound of 5 is
    that of ScaleRL, Khatri et al. 2025 (arXiv:2510.13786); MiniMax does not give theirs.

    Args:
        tokens: The trained tokens.
        clip_low: The weight is at least 1 - `clip_low`; 1 means no lower bound.
        clip_high: The weight is at most 1 + `clip_high`.
    """
    ratio = ratio_of(tokens.logprob, tokens.old_logprob).detach()
    weight = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    metrics = {
        "ratio": ratio,
        "clip_fraction_low": ratio < 1 - clip_low,
        "clip_fraction_high": ratio > 1 + clip_high,
    }
    return TokenLoss(-weight * tokens.advantage * tokens.logprob, metrics)
