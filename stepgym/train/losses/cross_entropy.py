"""Learning by imitation: the loss of supervised fine-tuning, and of cloning one's own good samples."""

from __future__ import annotations

import torch

from stepgym.train.losses.tokens import TokenLoss, Tokens, couples


def cross_entropy(logprob: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each trained token, [M]: what `sft` minimises."""
    return -logprob


@couples("token")
def filtered_cross_entropy(tokens: Tokens, *, only_positive: bool = True) -> TokenLoss:
    """Filtered behaviour cloning: loss = -log pi where A > 0, else 0. It is the loss named `cross_entropy`.

    What did better than its baseline is imitated, and how much better does not matter; what did worse is left alone.
    With rewards of 0 and 1 and a group baseline that is training on the successes of each task that also had failures
    (rejection sampling, expert iteration). Tokens with A <= 0 stay in the denominator of the reduction, so an update
    is smaller the fewer good ones there are.

    Source: Anthony et al. 2017, Thinking fast and slow (arXiv:1705.08439); for language models Gulcehre et al. 2023,
    ReST (arXiv:2308.08998), and Singh et al. 2023, ReST-EM (arXiv:2312.06585).

    Args:
        tokens: The trained tokens.
        only_positive: Imitate only tokens with A > 0. False imitates everything, whatever its advantage; groups
            without signal are still left out unless `zero_variance: keep` is set.
    """
    values = cross_entropy(tokens.logprob)
    if not only_positive:
        return TokenLoss(values)
    good = tokens.advantage > 0
    return TokenLoss(torch.where(good, values, torch.zeros_like(values)), {"imitated": good})
