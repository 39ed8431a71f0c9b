"""Soft adaptive policy optimisation: a smooth gate in place of the clip."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from stepgym.train.losses.tokens import TokenLoss, Tokens, couples, ratio_of


@couples("token")
def sapo(
    tokens: Tokens,
    *,
    tau_positive: Annotated[float, Field(gt=0)] = 1.0,
    tau_negative: Annotated[float, Field(gt=0)] = 1.05,
) -> TokenLoss:
    """SAPO: loss = -f(ratio) * A, f(x) = 4 / tau * sigmoid(tau * (x - 1)), ratio = pi / pi_old.

    tau is `tau_positive` for A > 0 and `tau_negative` for A < 0. The gradient is that of -ratio * A times
    w = 4 p (1 - p) with p = sigmoid(tau * (ratio - 1)): 1 for a ratio of 1, less the further away, never cut off. A
    larger tau fades sooner. The loss of a token on policy is -2 A / tau, not -A; only the gradient means something.

    Source: Gao et al. 2025, Soft adaptive policy optimization (arXiv:2511.20347), equations 5 and 6; the values of tau
    are those of its experiments.

    Args:
        tokens: The trained tokens.
        tau_positive: How sharply the gate closes on tokens with A > 0.
        tau_negative: The same for A < 0. At least `tau_positive`, says the paper: what lowers one token raises all
            others, most of which nobody wanted.
    """
    ratio = ratio_of(tokens.logprob, tokens.old_logprob)
    soft, hard = torch.full_like(ratio, tau_positive), torch.full_like(ratio, tau_negative)
    tau = torch.where(tokens.advantage > 0, soft, hard).detach()
    gate = torch.sigmoid(tau * (ratio - 1))
    fixed = gate.detach()
    metrics = {"ratio": ratio.detach(), "gate_weight": 4 * fixed * (1 - fixed)}
    return TokenLoss(-(4 / tau) * gate * tokens.advantage, metrics)
