"""Estimators of KL(pi || reference) from the sampled token alone, for the loss or for the reward.

With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As values under pi, k1 and k3 are unbiased
and k3 has the lower variance; k2 is biased a little. What training follows is a gradient, which depends on the place:

In the loss the estimator is differentiated. Expected gradient: of k1 zero; of k2 that of KL(pi || reference); of k3
that of KL(reference || pi), which agrees near the reference and is what GRPO uses.

In the reward the estimator is a number without gradient, taken off the reward of its token, and moves the policy
through the policy gradient. Expected gradient: of k1 that of KL(pi || reference); of k3 that of KL(pi || reference) -
KL(reference || pi), which all but vanishes near the reference; of k2 none that belongs to a divergence. So: k1 in the
reward, k2 or k3 in the loss.

Source: Schulman 2020, Approximating KL divergence (http://joschu.net/blog/kl-approx.html); k3 in the loss: Shao et al.
2024 (arXiv:2402.03300), equation 4; on the gradients: Tang & Munos 2025 (arXiv:2506.09477)
and Shah et al. 2025 (arXiv:2512.21852).
"""

from __future__ import annotations

import torch

from stepgym.train.losses.tokens import MAX_LOG_RATIO


def k1(logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """d = log pi - log reference, [M]. Can be negative."""
    return logprob - reference


def k2(logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2, [M]."""
    return 0.5 * (logprob - reference).square()


def k3(logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d, [M], with d held above -20. Never negative."""
    # The whole of d is held, not only the exponent: else the gradient would turn its sign around below -20.
    difference = torch.clamp(logprob - reference, min=-MAX_LOG_RATIO)
    return torch.exp(-difference) - 1 + difference
