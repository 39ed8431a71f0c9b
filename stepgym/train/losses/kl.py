"""Estimators of KL(pi || reference) from the sampled token alone, taken in the loss.

With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As values under pi, k1 and k3 are unbiased
and k3 has the lower variance; k2 is biased a little. Taken in the loss and differentiated, as here, it is different:
the expected gradient of k1 is zero; that of k2 is the gradient of KL(pi || reference); that of k3 is the gradient of
KL(reference || pi), which agrees near the reference and is what GRPO uses.

Source: Schulman 2020, Approximating KL divergence (http://joschu.net/blog/kl-approx.html); k3 in the loss: Shao et al.
2024 (arXiv:2402.03300), equation 4; on the gradients: Tang & Munos 2025 (arXiv:2506.09477).
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
    """exp(-d) - 1 + d, [M]. Never negative; -d is held under 20 before it is exponentiated."""
    difference = logprob - reference
    return torch.exp(torch.clamp(-difference, max=MAX_LOG_RATIO)) - 1 + difference
