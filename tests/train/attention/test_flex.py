"""FlexAttention over forests: its block mask, its values compiled, and its gradients in unfused form, on the CPU."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from stepgym.train.attention import flex
from stepgym.train.packs.micro_batch import Tree

CPU = torch.device("cpu")
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def random_tree(seed: int, nodes: int, branching: float = 0.02, roots: float = 0.002) -> Tree:
    """A depth-first forest: now and then it goes back to a random node of the path, or to none."""
    rng = np.random.default_rng(seed)
    end = np.full(nodes, nodes, np.int32)
    path: list[int] = []
    for node in range(nodes):
        if path and rng.random() < branching:
            keep = int(rng.integers(0, len(path) + 1))
            end[path[keep:]] = node
            del path[keep:]
        if path and rng.random() < roots:
            end[path] = node
            path.clear()
        path.append(node)
    return Tree.of(end)


def visible(tree: Tree, window: int | None = None) -> torch.Tensor:
    """bool [N, N], straight from the definition, by walking up from each node."""
    nodes = len(tree.end)
    parent = [-1] * nodes
    open_nodes: list[int] = []
    for node in range(nodes):
        while open_nodes and tree.end[open_nodes[-1]] <= node:
            open_nodes.pop()
        parent[node] = open_nodes[-1] if open_nodes else -1
        open_nodes.append(node)
    mask = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        key, steps = node, 0
        while key >= 0 and (window is None or steps < window):
            mask[node, key] = True
            key, steps = parent[key], steps + 1
    return mask


def inputs(nodes: int, heads: int = 4, groups: int = 2, width: int = 16, **options: Any) -> list[torch.Tensor]:
    """Queries, keys and values, padded with noise to the bucket."""
    generator = torch.Generator().manual_seed(nodes)
    length = flex.bucket(nodes)
    return [torch.randn(1, count, length, width, generator=generator, **options) for count in (heads, groups, groups)]


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, N, H, D], from the formula."""
    nodes, share = len(mask), query.shape[1] // key.shape[1]
    query, key, value = (tensor[:, :, :nodes] for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(share, 1) for tensor in (key, value))
    scores = query @ key.mT * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (torch.softmax(scores, -1)[..., :nodes] @ value).transpose(1, 2)


def attend(tensors: list[torch.Tensor], tree: Tree, **options: Any) -> torch.Tensor:
    plan = flex.prepare(tree, CPU)
    out, _ = flex._attend(torch.nn.Module(), *tensors, None, scaling=0.3, stepgym_tree=plan, **options)
    return out[:, : len(tree.end)]


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's own unfused form, which has a gradient on the CPU too."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 1300),
    branching=st.sampled_from([0.0, 0.005, 0.05, 0.5]),
    roots=st.sampled_from([0.0, 0.01]),
)
def test_the_mask_is_the_one_that_asking_for_each_pair_gives(
    seed: int, nodes: int, branching: float, roots: float
) -> None:
    plan = flex.prepare(random_tree(seed, nodes, branching, roots), CPU)
    ours = plan.mask()
    theirs = torch_flex.create_block_mask(ours.mask_mod, 1, 1, plan.length, plan.length, device="cpu")
    for one, other in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
    assert ours.shape == theirs.shape


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 700),
    branching=st.sampled_from([0.005, 0.05, 0.5]),
    window=st.one_of(st.none(), st.integers(1, 300)),
)
def test_the_mask_shows_each_node_its_path_and_nothing_else(
    seed: int, nodes: int, branching: float, window: int | None
) -> None:
    """Blocks that the kernel skips have no visible pair; blocks that it takes whole have no hidden one."""
    tree = random_tree(seed, nodes, branching)
    plan = flex.prepare(tree, CPU)
    mask = plan.mask(window)
    index = torch.arange(plan.length)
    pairs = mask.mask_mod(None, None, index[:, None], index[None])  # type: ignore[arg-type]
    expected = torch.eye(plan.length, dtype=torch.bool)
    expected[:nodes, :nodes] = visible(tree, window)
    assert torch.equal(pairs, expected)
    blocks = plan.length // flex.BLOCK
    by_block = expected.reshape(blocks, flex.BLOCK, blocks, flex.BLOCK).transpose(1, 2).flatten(2)
    for row in range(blocks):
        part = set(mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])].tolist())
        whole = set(mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].tolist())
        assert not part & whole
        assert whole == set(by_block[row].all(-1).nonzero().flatten().tolist())
        assert part | whole >= set(by_block[row].any(-1).nonzero().flatten().tolist())


def test_depths_by_hand() -> None:
    """0 is above 1 and 4; 1 is above 2 and 3; 5 is another root, above 6."""
    assert flex.depths(np.array([5, 4, 3, 4, 5, 7, 7], np.int32)).tolist() == [0, 1, 2, 2, 1, 0, 1]


@given(nodes=st.integers(1, 500_000))
def test_a_bucket_holds_its_nodes_and_little_more(nodes: int) -> None:
    length = flex.bucket(nodes)
    assert length >= nodes
    assert length % flex.BLOCK == 0
    assert length - nodes < max(flex.BLOCK, nodes / 32)
    assert flex.bucket(length) == length


def test_there_are_few_buckets() -> None:
    assert len({flex.bucket(nodes) for nodes in range(16_385, 32_769)}) == 32


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 37}, {"softcap": 5.0}, {"sinks": True}, {"groups": 4}, {"groups": 1, "heads": 7}],
    ids=str,
)
@pytest.mark.usefixtures("unfused")
def test_values_and_gradients_are_those_of_a_dense_mask(options: dict[str, Any]) -> None:
    tree = random_tree(3, 300, 0.03, 0.01)
    heads = options.pop("heads", 4)
    tensors = inputs(300, heads, options.pop("groups", 2), dtype=torch.float64)
    sinks = torch.randn(heads, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [tensor.requires_grad_() for tensor in (*tensors, sinks)]
    with_sinks = sinks if options.pop("sinks", False) else None
    out = attend(tensors, tree, s_aux=with_sinks, **options)
    expected = dense(
        *tensors,
        visible(tree, options.get("sliding_window")),
        softcap=options.get("softcap"),
        sinks=with_sinks,
    )
    assert torch.allclose(out, expected, atol=1e-9)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, atol=1e-9)


@compiler
def test_compiled_values_are_those_of_a_dense_mask() -> None:
    torch._dynamo.reset()
    tree = random_tree(0, 500, 0.03)
    tensors = inputs(500)
    with torch.no_grad():
        assert torch.allclose(attend(tensors, tree), dense(*tensors, visible(tree)), atol=1e-5)


def test_few_compilations_serve_all_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new forest brings a new mask function and perhaps a new length; at worst its layers would run unfused."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(torch_flex.flex_attention, fullgraph=True, backend=counter)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    counts = []
    for seed, nodes in enumerate([200, 300, 500, 700, 900, 1100, 200]):
        tree = random_tree(seed, nodes, 0.03)
        tensors = inputs(nodes, requires_grad=True)
        with torch.no_grad():
            attend(tensors, tree)
        out = attend(tensors, tree)
        assert torch.allclose(out, dense(*tensors, visible(tree)), atol=1e-5)
        out.sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] == 2  # without and with gradients
    assert counts[1] == 4  # the same for every length
    assert counts[-1] == 4


@pytest.mark.usefixtures("unfused")
def test_under_autocast_inputs_may_differ_in_type() -> None:
    """Normalised queries and keys are float32 there, values bfloat16."""
    tree = random_tree(1, 200, 0.03)
    query, key, value = inputs(200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend([query, key, value.bfloat16()], tree)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), dense(query, key, value, visible(tree)), atol=0.05)


def test_what_does_not_fit_is_refused() -> None:
    tree = random_tree(1, 200)
    with pytest.raises(ValueError, match="200 tokens for a forest padded to 256"):
        attend([tensor[:, :, :200] for tensor in inputs(200)], tree)
    with pytest.raises(NotImplementedError, match="no dropout"):
        attend(inputs(200), tree, dropout=0.1)
