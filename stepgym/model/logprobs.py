"""Log-probabilities of given tokens from hidden states, without ever holding logits of [tokens, vocabulary]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**25
"""Most logits that are held at a time (128 MiB in float32)."""


class TokenScores(NamedTuple):
    """What a model says about tokens that were sampled. All tensors are [K], float32 (float64 for a float64 model).

    Attributes:
        logprob: log-softmax(logits / temperature) of the token; carries the gradient.
        entropy: Entropy of softmax(logits / temperature) in nats, without gradient; None where not asked for.
        greedy: bool, whether the token is the most likely one; None where not asked for.
    """

    logprob: torch.Tensor
    entropy: torch.Tensor | None = None
    greedy: torch.Tensor | None = None


def token_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    entropy: bool = False,
    greedy: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenScores:
    """Score tokens from the hidden states that predict them.

    Where K * V exceeds `chunk_logits` it goes by chunks of tokens whose logits are computed again on the way back, so
    at most `chunk_logits` logits exist at a time. Which chunks are taken changes no result.

    Args:
        hidden: [K, H], the last hidden state before each token.
        weight: [V, H], the output embedding.
        targets: int64 [K], the tokens.
        bias: [V], or None.
        temperature: [K], above 0, or None for 1.
        entropy: Whether to return entropies too.
        greedy: Whether to return whether each token is the most likely one.
        chunk_logits: Most logits that are held at a time.
    """
    rows = max(1, chunk_logits // weight.shape[0])
    if len(hidden) <= rows:
        return TokenScores(*_score(hidden, weight, targets, bias, temperature, entropy, greedy))
    parts = []
    for start in range(0, len(hidden), rows):
        piece = slice(start, start + rows)
        inputs = (
            hidden[piece],
            weight,
            targets[piece],
            bias,
            None if temperature is None else temperature[piece],
            entropy,
            greedy,
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_score, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_score(*inputs))
    logprobs, entropies, hits = zip(*parts, strict=True)
    return TokenScores(
        torch.cat(logprobs),
        torch.cat(entropies) if entropy else None,
        torch.cat(hits) if greedy else None,
    )


def scores_from_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None = None,
    entropy: bool = False,
    greedy: bool = False,
) -> TokenScores:
    """Score tokens ([K]) from the logits that predict them ([K, V]). Half-precision logits are widened first."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if temperature is not None:
        logits = logits / temperature.to(logits.dtype)[:, None]
    logprob = -functional.cross_entropy(logits, targets, reduction="none")
    entropies = hits = None
    with torch.no_grad():
        if entropy:
            log_softmax = torch.log_softmax(logits, dim=-1)
            entropies = -(log_softmax.exp() * log_softmax.clamp(min=torch.finfo(logits.dtype).min)).sum(-1)
        if greedy:
            hits = logits.argmax(-1) == targets
    return TokenScores(logprob, entropies, hits)


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Whether a model's logits are one projection of its last hidden state: no soft cap, no scale. Tried, not guessed.

    Only then can `token_scores` stand in for the model's own head.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    ids = torch.arange(4, device=head.weight.device)[None] % model.config.get_text_config().vocab_size
    logits = model(input_ids=ids, use_cache=False).logits
    ours = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return bool(torch.equal(logits.to(ours.dtype), ours))


def _score(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    entropy: bool,
    greedy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return tuple(scores_from_logits(functional.linear(hidden, weight, bias), targets, temperature, entropy, greedy))  # type: ignore[return-value]
