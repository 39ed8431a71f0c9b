"""The clipped surrogate of proximal policy optimisation."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.losses.tokens import TokenLoss, Tokens, couples, ratio_of


@couples("token")
def ppo(
    tokens: Tokens,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2,
    clip_high: Annotated[float, Field(gt=0)] = 0.2,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> TokenLoss:
    """PPO clip: loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = pi / pi_old.

    With `dual_clip` = c the loss of a token with A < 0 is at most -c * A, so that no ratio that ran away dominates.

    Source: Schulman et al. 2017 (arXiv:1707.06347). `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al. 2025,
    arXiv:2503.14476). Dual clip: Ye et al. 2020 (arXiv:1912.09729).

    Args:
        tokens: The trained tokens.
        clip_low: A token with A < 0 stops pushing once its ratio is below 1 - `clip_low`.
        clip_high: A token with A > 0 stops pushing once its ratio is above 1 + `clip_high`.
        dual_clip: Upper bound on the ratio of tokens with A < 0; None for none.
    """
    advantage = tokens.advantage
    ratio = ratio_of(tokens.logprob, tokens.old_logprob)
    values = torch.maximum(-ratio * advantage, -torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    negative = advantage < 0
    fixed = ratio.detach()
    metrics = {
        "ratio": fixed,
        "clip_fraction_low": negative & (fixed < 1 - clip_low),
        "clip_fraction_high": (advantage > 0) & (fixed > 1 + clip_high),
    }
    if dual_clip is not None:
        values = torch.where(negative, torch.minimum(values, -dual_clip * advantage), values)
        metrics["clip_fraction_dual"] = negative & (fixed > dual_clip)
    return TokenLoss(values, metrics)
