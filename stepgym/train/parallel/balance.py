"""Which rank computes what: micro-batches of equal cost side by side, and as many on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch


class Work(Protocol):
    """What a cost is computed from; a `MicroBatch` is one."""

    @property
    def tokens(self) -> int: ...  # noqa: D102

    @property
    def visible_pairs(self) -> int: ...  # noqa: D102

    @property
    def place(self) -> torch.Tensor: ...  # noqa: D102


W = TypeVar("W", bound=Work)


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


def duration(costs: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """The sum over passes of the highest cost in each: what shares come to on ranks that wait for one another."""
    passes = zip_longest(*([costs[number] for number in share] for share in shares), fillvalue=0.0)
    return sum(max(costs_of_pass) for costs_of_pass in passes)


def deal(cut: Callable[[int], Sequence[W]], cost: Cost, budget: int, ranks: int) -> list[list[W]]:
    """Cut work for ranks such that none waits long for the others.

    Micro-batches as long as memory allows share most prefixes, but a last pass may have work for some ranks only. So
    smaller budgets are tried, which divide the tokens over whole passes, until one comes within a twentieth of work
    divided evenly; else the best of them is taken. The same on every rank.

    Args:
        cut: Makes micro-batches with at most so many tokens each.
        cost: Of a micro-batch.
        budget: Most tokens that memory allows.
        ranks: Number of ranks.

    Returns:
        For each rank its micro-batches, in the order of passes; see `assign`.
    """
    work = cut(budget)
    costs = [cost.of(part) for part in work]
    shares = assign(costs, ranks)
    best, even = duration(costs, shares), sum(costs) / ranks
    for smaller in budgets(sum(part.tokens for part in work), budget, ranks):
        if best <= 1.05 * even:
            break
        tried = cut(smaller)
        costs = [cost.of(part) for part in tried]
        found = assign(costs, ranks)
        if (took := duration(costs, found)) < best:
            work, shares, best = tried, found, took
    return [[work[number] for number in share] for share in shares]


def budgets(total_tokens: int, budget: int, ranks: int) -> list[int]:
    """Budgets below `budget` that divide tokens evenly over as many passes as are needed, or one more.

    With some room, more and less, because steps are not cut to fit.
    """
    passes = max(1, math.ceil(total_tokens / (budget * ranks)))
    found = []
    for number in (passes, passes + 1):
        for room in (1.1, 1.0, 1.2, 1.35):
            size = math.ceil(room * total_tokens / (number * ranks))
            if 0 < size < budget and size not in found:
                found.append(size)
    return found


def _first(config: Any, *names: str) -> int:
    """The first of the config's fields that is there, as a number; 0 where none is."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0
