"""Attention over a prefix forest on the CPU: exact, without masks, without gathering keys.

A *segment* is a run of nodes without a branch. In depth-first order everything that attends to a segment lies right
behind it: the nodes of the segment themselves, causally, and the whole range of its subtree, without exception. So
attention over a forest is two dense blocks per segment, over slices of the queries, keys and values as they lie, and
the pairs computed are exactly the visible ones. A query gathers one partial result from each segment on its path;
partial results are joined by their log-sum-exp, and the gradient of each block needs only the joined result, as in
ring attention (Liu et al. 2023, arXiv:2310.01889) and FlashAttention (Dao et al. 2022, arXiv:2205.14135).

The blocks are torch's own flash attention for the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgym.train.attention.plain import attend_plainly
from stepgym.train.packs.micro_batch import Tree

NAME = "stepgym_segments"


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_MASKED = -1e30
"""Added to the scores outside a sliding window. Finite, so that a query which sees nothing of a block stays a number,
with a weight of zero against any block that it does see."""


def register() -> None:
    """Make the kernel known to `transformers` as `NAME`. Called without a forest, it is plain causal attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


class Block(NamedTuple):
    """Queries that all see the same keys, or (`causal`) a segment that sees itself.

    Attributes:
        rows, columns: Where the queries and the keys lie.
        causal: Whether it is a segment with itself.
        first: Whether the queries have no result from another block yet.
    """

    rows: slice
    columns: slice
    causal: bool
    first: bool


class SegmentPlan:
    """The blocks of a forest.

    Attributes:
        blocks: Those of a segment stand before those of its subtree.
        depth: int64 tensor [N], position of each node.
        windows: The sliding windows that layers have asked for.
    """

    def __init__(self, tree: Tree) -> None:
        self.blocks: list[Block] = []
        self.depth = torch.from_numpy(tree.depth)
        self.windows: set[int] = set()
        covered = 0
        for start, stop, end in tree.segments.tolist():
            root = start >= covered
            covered = max(covered, end)
            inside, below = slice(start, stop), slice(stop, end)
            if stop < end:
                self.blocks.append(Block(below, inside, False, root))
            self.blocks.append(Block(inside, inside, True, root))

    def mask(self, block: Block, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of a block, [1, 1, Q, K], where a sliding window cuts into it; else None."""
        if window is None:
            return None
        self.windows.add(window)
        rows, columns = self.depth[block.rows], self.depth[block.columns]
        if int(rows.max() - columns.min()) < window:  # asked before anything of [Q, K] is made
            return None
        distance = rows[:, None] - columns
        hidden = distance >= window
        if block.causal:
            hidden |= distance < 0
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, _MASKED)[None, None]


def bucket(nodes: int) -> int:
    """How many nodes a forest of so many is filled up to: none are needed."""
    return nodes


def prepare(tree: Tree, device: torch.device) -> SegmentPlan:
    """What the kernel is given for a forest, as the keyword `stepgym_tree` of the model's forward."""
    return SegmentPlan(tree)


class _SegmentAttention(torch.autograd.Function):
    """softmax(scale * q k^T) v over the visible pairs. q [1, H, N, D]; k, v [1, G, N, D] with H a multiple of G.

    A sink [H] is one more score of each head, of a key without a value (gpt-oss, arXiv:2309.17453).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        plan: SegmentPlan,
        scale: float,
        window: int | None,
    ) -> Tensor:
        _, heads, count, _ = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        # Memory is laid out by token, then head, as the kernel and the model's projections have it.
        out = query.new_empty((1, count, heads, value.shape[-1]), dtype=wide).transpose(1, 2)
        total = query.new_empty((1, count, heads), dtype=wide).transpose(1, 2)
        for block in plan.blocks:
            rows, columns, causal, first = block
            mask = plan.mask(block, window, query.dtype)
            part, lse = _forward(
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                0.0,
                causal and mask is None,
                attn_mask=mask,
                scale=scale,
            )
            here, before = out[:, :, rows], total[:, :, rows]
            if first:
                here.copy_(part)
                before.copy_(lse)
            else:
                here.lerp_(part.to(wide), torch.sigmoid(lse - before).unsqueeze(-1))
                before.copy_(torch.logaddexp(before, lse))
        if sink is not None:
            with_sink = torch.logaddexp(total, sink.to(wide)[None, :, None])
            out.mul_(torch.exp(total - with_sink).unsqueeze(-1))
            total.copy_(with_sink)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sink, out, total)
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, total = ctx.saved_tensors
        inputs = (query, key, value)
        grads = [torch.zeros_like(tensor, dtype=total.dtype) for tensor in inputs]
        for block in ctx.plan.blocks:
            rows, columns, causal, _ = block
            mask = ctx.plan.mask(block, ctx.window, query.dtype)
            # With the log-sum-exp over all keys, a block's own gradient is its share of the whole one.
            parts = _backward(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                out[:, :, rows],
                total[:, :, rows],
                0.0,
                causal and mask is None,
                attn_mask=mask,
                scale=ctx.scale,
            )
            for whole, part, where in zip(grads, parts, (rows, columns, columns), strict=True):
                whole[:, :, where] += part
        of_sink = None
        if sink is not None:
            share = torch.exp(sink.to(total.dtype)[None, :, None] - total)
            of_sink = -(share * (grad * out).sum(-1)).sum((0, 2)).to(sink.dtype)
        found = [whole.to(tensor.dtype) for whole, tensor in zip(grads, inputs, strict=True)]
        return (*found, of_sink, None, None, None)


# It goes by the blocks of each forest: compiled, each forest would compile anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    stepgym_tree: SegmentPlan | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if stepgym_tree is None:
        options |= {"scaling": scaling, "sliding_window": sliding_window, "s_aux": s_aux}
        return attend_plainly(module, query, key, value, attention_mask, **options)
    for name in ("softcap", "position_bias"):
        if options.get(name) is not None:
            raise NotImplementedError(f"{NAME}: {name} is not supported")
    # Under autocast a norm may have widened queries and keys; values say in which type to compute.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention (DeepSeek): torch's kernel wants heads of one size
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    out: Tensor = _SegmentAttention.apply(query, key, value, s_aux, stepgym_tree, scale, sliding_window)  # type: ignore[no-untyped-call]
    return out[..., :width].transpose(1, 2), None
