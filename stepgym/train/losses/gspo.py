"""Group sequence policy optimisation: one ratio, and one clip, for a whole sequence."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.losses.tokens import MAX_LOG_RATIO, TokenLoss, Tokens
from stepgym.train.losses.units import SequenceUnit, mean_over


def gspo(
    tokens: Tokens,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4,
    clip_high: Annotated[float, Field(gt=0)] = 4e-4,
    unit: SequenceUnit = "step",
) -> TokenLoss:
    """GSPO: loss = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean of log(pi / pi_old)).

    The mean is over all trained tokens of the unit, so s is the geometric mean of their ratios, and a unit is clipped
    as a whole. It is computed in the form for tokens, s_t = sg[s] * pi_t / sg[pi_t] with sg = no gradient, whose value
    is s and whose gradient is s * A * d log pi_t. Where the tokens of a unit share an advantage and a weight, this is
    GSPO to the letter, value and gradient; where they do not (turn-level credit with `unit: trajectory`), it is
    GSPO-token. The paper's reduction is the mean over sequences, so take `reduction` equal to `unit`.

    Source: Zheng et al. 2025, Group sequence policy optimization (arXiv:2507.18071): equations 5 and 7, section 4.3 for
    the form for tokens, section 5.1 for the clip ranges, which are much narrower than those of PPO because a mean of
    many log-ratios moves less than each.

    Args:
        tokens: The trained tokens; of a unit, all or none.
        clip_low: A unit with A < 0 stops pushing once s is below 1 - `clip_low`.
        clip_high: A unit with A > 0 stops pushing once s is above 1 + `clip_high`.
        unit: What a sequence is: one model turn, or all turns of a trajectory.
    """
    advantage = tokens.advantage
    log_ratio = (tokens.logprob - tokens.old_logprob).detach()
    log_ratio = mean_over(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO), tokens, unit)
    ratio = torch.exp(log_ratio + (tokens.logprob - tokens.logprob.detach()))
    values = torch.maximum(-ratio * advantage, -torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    fixed = ratio.detach()
    metrics = {
        "ratio": fixed,
        "clip_fraction_low": (advantage < 0) & (fixed < 1 - clip_low),
        "clip_fraction_high": (advantage > 0) & (fixed > 1 + clip_high),
    }
    return TokenLoss(values, metrics)
