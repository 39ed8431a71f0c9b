from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from stepgym.train.attention import segments
from stepgym.train.packs.micro_batch import Tree


def forest(choices: list[int]) -> tuple[list[int], Tree]:
    """Parents and tree of a forest in depth-first order: each node goes back so many steps from the one before."""
    parents: list[int] = []
    way: list[int] = []
    for node, back in enumerate(choices):
        way = way[: max(0, len(way) - back)]
        parents.append(way[-1] if way else -1)
        way.append(node)
    end = np.arange(1, len(choices) + 1, dtype=np.int32)
    for node in range(len(choices) - 1, -1, -1):
        if parents[node] >= 0:
            end[parents[node]] = max(end[parents[node]], end[node])
    return parents, Tree.of(end)


def ancestors(parents: list[int], node: int) -> list[int]:
    way = [node]
    while parents[way[-1]] >= 0:
        way.append(parents[way[-1]])
    return way


class Layer:
    """What `transformers` gives a kernel besides the tensors."""

    num_key_value_groups = 2
    is_causal = True
    training = False


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=1, max_size=40),
    st.sampled_from([None, 1, 3, 10]),
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from([(4, 2), (2, 2)]),
)
def test_values_and_gradients_are_those_of_a_dense_mask(
    choices: list[int], window: int | None, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    parents, tree = forest(choices)
    count = len(parents)
    visible = torch.zeros(count, count, dtype=torch.bool)
    for node in range(count):
        for distance, other in enumerate(ancestors(parents, node)):
            visible[node, other] = window is None or distance < window
    if window is None:
        assert int(visible.sum()) == tree.visible_pairs
    generator = torch.Generator().manual_seed(count)
    tensors = [
        torch.randn(1, count, number, 8, dtype=dtype, generator=generator).transpose(1, 2).requires_grad_(True)
        for number in (heads[0], heads[1], heads[1])
    ]
    slope = torch.randn(1, count, heads[0], 8, dtype=dtype, generator=generator)
    plan = segments.prepare(tree, torch.device("cpu"))
    ours, _ = segments._attend(Layer(), *tensors, None, scaling=0.4, sliding_window=window, stepgym_tree=plan)
    dense = scaled_dot_product_attention(*tensors, attn_mask=visible, scale=0.4, enable_gqa=True).transpose(1, 2)
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    assert (ours - dense).abs().max() < limit
    for one, other in zip(
        torch.autograd.grad(ours, tensors, slope), torch.autograd.grad(dense, tensors, slope), strict=True
    ):
        assert (one - other).abs().max() < limit


def test_bfloat16_is_joined_in_float32() -> None:
    _, tree = forest([0] * 30 + [20] + [0] * 20 + [15] + [0] * 30)
    exact = torch.randn(3, 1, 82, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        query, key, value = (part.to(dtype).transpose(1, 2) for part in exact.bfloat16())
        plan = segments.prepare(tree, torch.device("cpu"))
        results[dtype] = segments._attend(Layer(), query, key, value, None, stepgym_tree=plan)[0]
    assert results[torch.bfloat16].dtype == torch.bfloat16
    gap = (results[torch.bfloat16].double() - results[torch.float64]).norm() / results[torch.float64].norm()
    assert float(gap) < 5e-3


@pytest.mark.parametrize("name", ["softcap", "position_bias"])
def test_what_the_kernel_does_not_know_is_refused(name: str) -> None:
    tensor = torch.zeros(1, 2, 3, 8)
    plan = segments.prepare(forest([0, 0, 0])[1], torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=name):
        segments._attend(Layer(), tensor, tensor, tensor, None, stepgym_tree=plan, **{name: torch.ones(2)})


def test_without_a_forest_it_is_plain_causal_attention() -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    ours, _ = segments._attend(Layer(), query, key, value, None)
    assert torch.allclose(ours, scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2))


@given(st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=1, max_size=60))
def test_segments_are_the_runs_without_a_branch(choices: list[int]) -> None:
    parents, tree = forest(choices)
    assert tree.depth.tolist() == [len(ancestors(parents, node)) - 1 for node in range(len(parents))]
    children = [parents.count(node) for node in range(len(parents))]
    starts = [n for n in range(len(parents)) if parents[n] < 0 or parents[n] != n - 1 or children[n - 1] != 1]
    assert tree.segments[:, 0].tolist() == starts
    assert tree.segments[:, 1].tolist() == [*starts[1:], len(parents)]


def test_a_sink_takes_its_share_and_its_gradient() -> None:
    """A sink is one more key, seen by all, whose value is zero."""
    parents, tree = forest([0, 0, 0, 2, 0, 1, 0, 9, 0])
    count = len(parents)
    visible = torch.zeros(count, count + 1, dtype=torch.bool)
    visible[:, 0] = True
    for node in range(count):
        visible[node, [1 + other for other in ancestors(parents, node)]] = True
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, count, 8, dtype=torch.float64, generator=generator).requires_grad_(True) for _ in range(3)
    )
    sink = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    ours, _ = segments._attend(
        Layer(), query, key, value, None, scaling=0.4, s_aux=sink, stepgym_tree=segments.prepare(tree, query.device)
    )
    scores = torch.cat([sink[None, :, None, None].expand(1, 2, count, 1), 0.4 * query @ key.transpose(-1, -2)], -1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    dense = (weights[..., 1:] @ value).transpose(1, 2)
    assert (ours - dense).abs().max() < 1e-12
    slope = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    inputs = (query, key, value, sink)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, slope), torch.autograd.grad(dense, inputs, slope), strict=True
    ):
        assert (one - other).abs().max() < 1e-12


def test_values_may_be_narrower_than_keys() -> None:
    _, tree = forest([0, 0, 0, 2, 0, 1])
    query, key, value = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    plan = segments.prepare(tree, query.device)
    wide, _ = segments._attend(Layer(), query, key, value, None, stepgym_tree=plan)
    narrow, _ = segments._attend(Layer(), query, key, value[..., :5], None, stepgym_tree=plan)
    assert torch.equal(narrow, wide[..., :5])
