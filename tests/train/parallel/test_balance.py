from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.train.parallel.balance import Cost, assign, budgets, deal, duration


def passes(costs: list[float], shares: list[list[int]]) -> float:
    """The time of all passes: each takes as long as the costliest micro-batch in it."""
    rounds = itertools.zip_longest(*([costs[number] for number in share] for share in shares), fillvalue=0.0)
    return sum(max(costs_of_pass) for costs_of_pass in rounds)


def test_equal_costs_lie_side_by_side_and_sums_are_even() -> None:
    # Passes (9, 8), (7, 3), (1): rank 0 has 9, so the 7 of the second pass is rank 1's; sums 12 and 15 before the
    # last, which goes to rank 0.
    assert assign([3.0, 9.0, 1.0, 8.0, 7.0], 2) == [[1, 0, 2], [3, 4]]
    assert assign([], 3) == [[], [], []]
    assert assign([5.0], 3) == [[0], [], []]


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 3))
def test_no_way_of_dealing_takes_less_time(costs: list[int], ranks: int) -> None:
    shares = assign([float(cost) for cost in costs], ranks)
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    best = min(
        passes(costs, [list(order[rank::ranks]) for rank in range(ranks)])
        for order in itertools.permutations(range(len(costs)))
    )
    assert passes(costs, shares) == best


class Bin:
    """Steps of given lengths, computed together; attention and head cost nothing."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.tokens = sum(lengths)
        self.visible_pairs = 0
        self.place = torch.zeros(0)


def next_fit(lengths: list[int], budget: int) -> list[Bin]:
    bins: list[list[int]] = []
    for length in lengths:
        if bins and sum(bins[-1]) + length <= budget:
            bins[-1].append(length)
        else:
            bins.append([length])
    return [Bin(part) for part in bins]


TOKENS = Cost(per_token=1.0, per_pair=0.0, per_row=0.0)


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "passes"),
    [
        ([100] * 8, 10_000, 4, [[200], [200], [200], [200]]),  # one micro-batch would leave three ranks without work
        ([100] * 8, 400, 1, [[400, 400]]),
        ([100] * 9, 300, 2, [[300, 200], [200, 200]]),  # 3 of 300 would take 600; 4 of 200 and 300 take 500
        ([100] * 8, 200, 4, [[200], [200], [200], [200]]),
        ([], 100, 2, [[], []]),
    ],
)
def test_work_is_cut_so_that_all_ranks_have_some(
    lengths: list[int], budget: int, ranks: int, passes: list[list[int]]
) -> None:
    shares = deal(lambda most: next_fit(lengths, most), TOKENS, budget, ranks)
    assert sum(part.tokens for share in shares for part in share) == sum(lengths)
    took = duration([cost for share in passes for cost in share], numbered(passes))
    assert duration([part.tokens for share in shares for part in share], numbered(shares)) <= took


def numbered(shares: list[list[Any]]) -> list[list[int]]:
    numbers = itertools.count()
    return [[next(numbers) for _ in share] for share in shares]


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(300, 2000), st.integers(1, 8))
def test_dealing_loses_nothing_and_is_never_worse_than_the_whole_budget(
    lengths: list[int], budget: int, ranks: int
) -> None:
    shares = deal(lambda most: next_fit(lengths, most), TOKENS, budget, ranks)
    parts = [part for share in shares for part in share]
    assert sorted(length for part in parts for length in part.lengths) == sorted(lengths)
    assert all(part.tokens <= budget for part in parts)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    whole = [float(part.tokens) for part in next_fit(lengths, budget)]
    assert passes([float(part.tokens) for part in parts], numbered(shares)) <= passes(whole, assign(whole, ranks))
    assert all(0 < smaller < budget for smaller in budgets(sum(lengths), budget, ranks))


def work(tokens: int, pairs: int, rows: int) -> SimpleNamespace:
    return SimpleNamespace(tokens=tokens, visible_pairs=pairs, place=torch.zeros(rows))


def test_cost_counts_every_product_once(make: SimpleNamespace) -> None:
    # Llama of conftest: 2 layers, width 16, 2 heads and 1 key-value head of 8, 24 in between, 89 words, not tied.
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
    cost = Cost.of_model(make.model("llama"))
    assert cost == Cost(per_token=2.0 * 2 * layer, per_pair=4.0 * 2 * 16, per_row=2.0 * 16 * 89)
    assert cost.of(work(10, 55, 3)) == 10 * cost.per_token + 55 * cost.per_pair + 3 * cost.per_row
    # Qwen3 of conftest ties its embeddings: they are the head and no linear layer.
    assert Cost.of_model(make.model("qwen3")).per_token == 2.0 * 2 * layer


def test_of_a_mixture_of_experts_a_token_passes_those_it_is_sent_to() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
        num_experts=4, num_experts_per_tok=1, moe_intermediate_size=6, decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
    attention, router, expert = 4 * 8 * 8, 4 * 8, 3 * 8 * 6
    assert Cost.of_model(Qwen3MoeForCausalLM(config)).per_token == pytest.approx(2 * (attention + router + expert))
