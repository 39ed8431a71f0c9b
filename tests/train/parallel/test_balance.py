from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.train.parallel.balance import Cost, assign, budget_for


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


def test_the_budget_shrinks_until_all_ranks_have_work() -> None:
    assert budget_for(1000, 16384, 1) == 1050
    assert budget_for(1000, 16384, 4) == 263  # ceil(1.05 * 250)
    assert budget_for(100_000, 16384, 4) == 13125  # 7 packs: two passes of 4, 12500 each and a twentieth
    assert budget_for(131_072, 16384, 4) == 16384  # 8 packs, all full
    assert budget_for(0, 16384, 4) == 1


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 64))
def test_the_budget_never_grows_and_needs_no_more_passes(total: int, budget: int, ranks: int) -> None:
    chosen = budget_for(total, budget, ranks)
    assert 1 <= chosen <= budget
    assert -(-total // (chosen * ranks)) == -(-total // (budget * ranks))


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
