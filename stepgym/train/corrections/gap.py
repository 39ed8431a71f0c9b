"""The log-ratio between trainer and sampler, which every correction starts from."""

from __future__ import annotations

import torch

from stepgym.train.losses.tokens import MAX_LOG_RATIO, Tokens


def sampler_log_ratio(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi_old - log mu of each token, without gradient.

    Returns:
        The log-ratio [M], held within `MAX_LOG_RATIO` of zero and 0 where mu is unknown; and a bool tensor [M], whether
        mu is known (is not NaN).
    """
    sampler = tokens.sampler_logprob.to(tokens.old_logprob.dtype)
    known = ~sampler.isnan()
    # Both may be -inf, whose difference is NaN: two that agree that a token is impossible have no gap.
    gap = torch.nan_to_num(tokens.old_logprob - sampler, nan=0.0)
    return torch.clamp(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO).detach(), known
