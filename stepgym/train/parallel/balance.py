"""Which rank computes what: micro-batches of equal cost side by side, and as many on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Work(Protocol):
    """What a cost is computed from; a `MicroBatch` is one."""

    @property
    def tokens(self) -> int: ...  # noqa: D102

    @property
    def visible_pairs(self) -> int: ...  # noqa: D102

    @property
    def place(self) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations of a forward pass; a backward pass takes twice as many, in the same proportions.

    Attributes:
        per_token: Of the linear layers, for a token: two for each weight that it passes.
        per_pair: Of attention, for a pair of a query and a key that it sees: four for each element of a head, in all
            heads and layers.
        per_row: Of the head, for a row that predicts: two for each weight.
    """

    per_token: float
    per_pair: float
    per_row: float

    @classmethod
    def of_model(cls, model: Any) -> Cost:
        """The cost of a causal language model of `transformers`, from its weights and its config.

        Of a mixture of experts a token passes the experts it is sent to. An adapter's weights count as any others.
        """
        config = model.config.get_text_config()
        ends = {
            id(p) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for p in end.parameters()
        }
        experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
        chosen = _first(config, "num_experts_per_tok", "moe_top_k", "num_experts_per_token")
        share = min(1.0, chosen / experts) if experts and chosen else 1.0
        weights = 0.0
        for name, parameter in model.named_parameters():
            if id(parameter) not in ends and parameter.ndim > 1:
                weights += parameter.numel() * (share if "experts" in name.split(".") else 1.0)
        heads = _first(config, "num_attention_heads") or 1
        width = _first(config, "head_dim") or config.hidden_size // heads
        return cls(
            per_token=2.0 * weights,
            per_pair=4.0 * config.num_hidden_layers * heads * width,
            per_row=2.0 * config.hidden_size * config.vocab_size,
        )

    def of(self, work: Work) -> float:
        """Operations of one forward pass."""
        return self.per_token * work.tokens + self.per_pair * work.visible_pairs + self.per_row * len(work.place)


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal micro-batches to ranks.

    Under FSDP all ranks go through the layers of a pass together, so a pass takes as long as the costliest micro-batch
    in it. In order of falling cost, `ranks` micro-batches at a time make a pass: no other way of dealing has a smaller
    sum of the passes' highest costs, or fewer passes. Within a pass the costliest goes to the rank that has done least,
    so that the ranks' sums are even too.

    Args:
        costs: Of each micro-batch.
        ranks: Number of ranks.

    Returns:
        For each rank the numbers of its micro-batches, in the order of passes. Lengths differ by one at most: in the
        last pass, who has none must take part with an idle micro-batch.
    """
    order = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for first in range(0, len(order), ranks):
        least_loaded = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, number in zip(least_loaded, order[first : first + ranks], strict=False):
            shares[rank].append(number)
            loads[rank] += costs[number]
    return shares


def budget_for(total_tokens: int, budget: int, ranks: int) -> int:
    """Tokens of a micro-batch such that every pass has work for all ranks.

    With `n` passes of `ranks` micro-batches at most `budget` long, the tokens divided evenly over them, and a
    twentieth of room because steps are not cut to fit.

    Args:
        total_tokens: Tokens of all micro-batches together.
        budget: Most tokens of one.
        ranks: Number of ranks.

    Returns:
        A number from 1 to `budget`.
    """
    passes = max(1, math.ceil(total_tokens / (budget * ranks)))
    return max(1, min(budget, math.ceil(1.05 * total_tokens / (passes * ranks))))


def _first(config: Any, *names: str) -> int:
    """The first of the config's fields that is there, as a number; 0 where none is."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0
