"""Draws one token per row of logits, each row by its own settings and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepgym.record.step import Sampling


class UniformStream:
    """Uniform numbers in [0, 1) of one request: the i-th token it draws always uses the i-th number."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed & (2**128 - 1)))

    def next(self, count: int) -> NDArray[np.float64]:
        """The next `count` numbers: float64 [count]."""
        return self._generator.random(count)


def is_plain(sampling: Sampling) -> bool:
    """Whether a response is drawn from the whole distribution, or greedily, without penalties."""
    return not (is_truncated(sampling) or has_penalties(sampling))


def is_truncated(sampling: Sampling) -> bool:
    """Whether unlikely tokens are cut off."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def has_penalties(sampling: Sampling) -> bool:
    """Whether tokens that were there before are made less likely, or more."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def draw(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    special: Sequence[tuple[int, Sampling, NDArray[np.int32], NDArray[np.int32]]] = (),
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row.

    Args:
        logits: float32 [rows, vocabulary], as the model gave them.
        temperatures: float32 [rows]; 0 takes the most likely token.
        uniforms: float64 [rows] in [0, 1): the token is where the cumulative distribution passes this number.
        special: `(row, sampling, prompt_ids, response_ids)` of the rows that are truncated or penalised.

    Returns:
        `(tokens, logprobs)`, int64 and float32 [rows]. A logprob is that of log-softmax(logits / temperature) of the
        model's own logits, before truncation and penalties; at temperature 0 it is taken at temperature 1.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)[:, None]
    scaled = logits / scale
    logprobs = torch.log_softmax(scaled, dim=-1)
    wanted, best = logprobs, logits  # the likeliest is told by logits: rounding makes equals of logprobs
    if special:
        wanted, best = logprobs.clone(), logits.clone()
        for row, sampling, prompt_ids, response_ids in special:
            wanted[row] = best[row] = _restricted(logits[row], scale[row, 0], sampling, prompt_ids, response_ids)
    # Summed in the order of ids and in double precision: noise in the logits then moves a boundary between two
    # tokens by as little as the noise is, so equal seeds give equal tokens whatever else is in the batch.
    precision = torch.float32 if logits.device.type == "mps" else torch.float64
    cumulative = torch.cumsum(wanted.exp(), dim=-1, dtype=precision)
    target = (uniforms.to(precision) * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    likeliest = best.argmax(dim=-1)
    tokens = torch.where(greedy | (tokens >= logits.shape[1]), likeliest, tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _restricted(
    logits: Tensor, scale: Tensor, sampling: Sampling, prompt_ids: NDArray[np.int32], response_ids: NDArray[np.int32]
) -> Tensor:
    """log-probabilities [vocabulary] that are drawn from: penalties, temperature, min-p, top-k, top-p, in this order.

    The order, and that repetition also counts the prompt while presence and frequency do not, are vLLM's.
    """
    if has_penalties(sampling):
        logits = logits.clone()
        known = np.unique(np.concatenate([prompt_ids, response_ids])).astype(np.int64)
        seen = torch.from_numpy(known).to(logits.device)
        before = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(before > 0, before / penalty, before * penalty)
        ids, counts = np.unique(response_ids, return_counts=True)
        said = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
        times = torch.from_numpy(counts.astype(np.float32)).to(logits.device)
        logits[said] -= sampling.frequency_penalty * times + sampling.presence_penalty
    logprobs = torch.log_softmax(logits / scale, dim=-1)
    if sampling.min_p > 0:
        logprobs = logprobs.masked_fill(logprobs < logprobs.max() + np.log(sampling.min_p), float("-inf"))
    if sampling.top_k > 0 or sampling.top_p < 1:
        ordered, ids_by_rank = logprobs.sort(descending=True, stable=True)
        drop = torch.zeros_like(ordered, dtype=torch.bool)
        if 0 < sampling.top_k < len(ordered):
            drop[sampling.top_k :] = True
        if sampling.top_p < 1:
            share = torch.softmax(ordered.masked_fill(drop, float("-inf")), dim=-1)
            drop |= share.cumsum(dim=-1) - share >= sampling.top_p
        drop[0] = False
        logprobs = logprobs.masked_fill(torch.zeros_like(drop).scatter(0, ids_by_rank, drop), float("-inf"))
    return torch.log_softmax(logprobs, dim=-1)
