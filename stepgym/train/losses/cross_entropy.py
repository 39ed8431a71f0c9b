"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch


def cross_entropy(logprob: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each trained token, [M]: what `sft` minimises."""
    return -logprob
