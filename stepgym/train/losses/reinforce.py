"""The policy gradient as it is."""

from __future__ import annotations

from stepgym.train.losses.tokens import TokenLoss, Tokens, couples


@couples("token")
def reinforce(tokens: Tokens) -> TokenLoss:
    """REINFORCE: loss = -A * log pi, with no ratio and no clip.

    Its gradient is that of PPO on policy, where the ratio is 1; the value differs. Nothing holds it back once the
    weights have moved, so it belongs with one update a batch (`mini_batches: 1`, `epochs: 1`). What separates sampler
    and trainer before that update is the correction's business.

    Source: Williams 1992, Simple statistical gradient-following algorithms; for language models Ahmadian
    et al. 2024, Back to basics (arXiv:2402.14740).

    Args:
        tokens: The trained tokens.
    """
    return TokenLoss(-tokens.advantage * tokens.logprob)
