"""Masked importance sampling: tokens on which sampler and trainer disagree too much are left out."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.corrections.gap import sampler_log_ratio
from stepgym.train.losses.tokens import Tokens, TokenWeights, couples


@couples("token")
def masked(
    tokens: Tokens,
    *,
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    high: Annotated[float, Field(gt=1)] | None = 5.0,
    weigh: bool = True,
) -> TokenWeights:
    """Mask by ratio: a token is kept where low <= pi_old / mu <= high, with that ratio as its weight, else left out.

    Truncation keeps the tokens with the wildest ratios at a bounded weight; this takes them for noise. With its
    defaults it is IcePop. With `weigh: false` it is rejection alone, and with `low: 0` masked importance sampling. A
    token without a comparable mu is kept with weight 1.

    Source: Ling team 2025, Every step evolves (arXiv:2510.18855): the mask M of IcePop and its bounds 0.5 and 5.
    Masked importance sampling: Liu & Li et al. 2025, When speed kills stability
    (https://richardli.xyz/post/rl-collapse-training-inference). Unlike there, a token that is left out also leaves the
    denominator of the reduction.

    Args:
        tokens: The trained tokens.
        low: The smallest ratio that is kept; 0 for no bound.
        high: The largest ratio that is kept; None for no bound.
        weigh: Whether the ratio is the weight of what is kept. False gives it weight 1.
    """
    log_ratio, known = sampler_log_ratio(tokens)
    ratio = torch.exp(log_ratio)
    keep = ~known | ((ratio >= low) & (ratio <= (torch.inf if high is None else high)))
    kept = ratio if weigh else torch.ones_like(ratio)
    weights = torch.where(keep, kept, torch.zeros_like(ratio))
    return TokenWeights(
        weights, keep, {"importance_weight": weights, "importance_masked": ~keep, "importance_missing": ~known}
    )
