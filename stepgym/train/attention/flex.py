"""Attention over a prefix forest on CUDA: FlexAttention, with a block mask made from the depth-first intervals.

FlexAttention: Dong et al. 2024, arXiv:2412.05496.

Query q attends to key k exactly when `k <= q < end[k]`; in a layer with a sliding window of w also
`depth[q] - depth[k] < w`. Of each block of 128 x 128 pairs it is decided from the largest and the smallest `end` of its
keys whether none, some or all pairs are visible, so a mask costs O((N / 128)^2), where asking for each pair costs
O(N^2) time and memory.

Soft caps of attention scores (Gemma 2) and attention sinks (gpt-oss) are supported; dropout is not.
Forward and mask are tested on the CPU, gradients in FlexAttention's unfused form; its CUDA kernels are untested here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from stepgym.train.attention.plain import attend_plainly
from stepgym.train.packs.micro_batch import Tree

NAME = "stepgym_flex"
BLOCK = 128
"""Width of a block of the mask, in nodes; what FlexAttention's kernels are tuned for."""


def register() -> None:
    """Make the kernel known to `transformers` as `NAME`. Called without a forest, it is plain causal attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def bucket(nodes: int) -> int:
    """Number of nodes to pad a forest to, so that few shapes are compiled and allocated: at most 32 for each doubling.

    Multiples of 128 up to 8192 nodes; above, padding is less than a thirty-second.
    """
    step = max(BLOCK, 1 << max(0, (nodes - 1).bit_length() - 6))
    return -(-nodes // step) * step


class FlexPlan:
    """The block masks of a forest, one for each width of sliding window that a layer asks for.

    Attributes:
        length: Number of nodes, padding included.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        nodes = len(tree.end)
        self.length = bucket(nodes)
        # Padding attends to itself only, and nothing else to it.
        end = np.concatenate([tree.end, np.arange(nodes + 1, self.length + 1, dtype=np.int32)])
        self._end = end
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}

    @property
    def windows(self) -> set[int]:
        """The sliding windows that layers have asked for."""
        return {window for window in self._masks if window is not None}

    def mask(self, window: int | None = None) -> BlockMask:
        """The mask of layers whose queries see at most `window` nodes of their path, themselves included."""
        if window not in self._masks:
            self._masks[window] = _block_mask(self._end, window, self._device)
        return self._masks[window]


def prepare(tree: Tree, device: torch.device) -> FlexPlan:
    """What the kernel is given for a forest, as the keyword `stepgym_tree` of the model's forward.

    The forest is taken as it is, not padded; ids and positions that the model is given must be padded to
    `bucket(len(tree.end))`, with any values.
    """
    plan = FlexPlan(tree, device)
    plan.mask()
    return plan


def _block_mask(end: np.ndarray[Any, np.dtype[np.int32]], window: int | None, device: torch.device) -> BlockMask:
    blocks = len(end) // BLOCK
    by_block = end.reshape(blocks, BLOCK)
    first = torch.arange(blocks, device=device)[:, None] * BLOCK  # of each block of queries
    below = torch.ones(blocks, blocks, dtype=torch.bool, device=device).tril(-1)
    some = below & (_on(by_block.max(1), device) > first)
    full = below & (_on(by_block.min(1), device) >= first + BLOCK)
    some |= torch.eye(blocks, dtype=torch.bool, device=device)
    if window is not None:
        depth = depths(end).reshape(blocks, BLOCK)
        low, high = _on(depth.min(1), device), _on(depth.max(1), device)
        some &= low[:, None] - high < window  # may keep a block without a visible pair, never lose one with
        full &= high[:, None] - low < window
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_visible(end, window, device),
        seq_lengths=(len(end), len(end)),
    )


def depths(end: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [N], number of nodes above each: of the nodes before it, those whose subtree has not ended."""
    nodes = np.arange(len(end))
    return nodes - np.searchsorted(np.sort(end), nodes, side="right")


def _visible(
    end: np.ndarray[Any, np.dtype[np.int32]], window: int | None, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    ends = _on(end, device)
    if window is None:
        return lambda batch, head, query, key: (key <= query) & (query < ends[key])
    depth = _on(depths(end).astype(np.int32), device)
    return lambda batch, head, query, key: (key <= query) & (query < ends[key]) & (depth[query] - depth[key] < window)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of true entries of each row, int32 [1, 1, R], and column numbers, those first, int32 [1, 1, R, C]."""
    numbers = blocks.sum(1, dtype=torch.int32)
    columns = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return numbers[None, None], columns[None, None].contiguous()


def _on(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Without compilation FlexAttention holds all scores. The second length seen compiles for every length.
    allow_variants()
    return torch.compile(flex_attention, fullgraph=True)


def allow_variants() -> None:
    """Let torch compile a function often enough: with and without gradients, dropout, adapter, sliding window, ...

    Beyond its limit it would silently compute without compilation.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    stepgym_tree: FlexPlan | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as `transformers` calls it. query [1, H, N, D]; key, value [1, G, N, D], G divides H.

    Returns [1, N, H, D].
    """
    if stepgym_tree is None:
        rest |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return attend_plainly(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, **rest)
    if dropout:
        raise NotImplementedError("attention over a forest has no dropout")
    if query.shape[2] != stepgym_tree.length:
        raise ValueError(f"{query.shape[2]} tokens for a forest padded to {stepgym_tree.length}")
    dtype = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else value.dtype
    attention: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out = attention(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=stepgym_tree.mask(sliding_window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if s_aux is None else AuxRequest(lse=True),
        # Lengths are whole blocks, which the compiler cannot see where it keeps lengths open. ROWS_GUARANTEED_SAFE must
        # stay off: it wants a visible key in the first block of every row.
        kernel_options={"IS_DIVISIBLE": True} if query.is_cuda else None,
    )
    if s_aux is not None:
        # A sink is one more key whose value is zero: it takes its share of the softmax.
        out, aux = out
        out = out * torch.sigmoid(aux.lse - s_aux.to(aux.lse.dtype)[:, None]).to(out.dtype).unsqueeze(-1)
    return out.transpose(1, 2).contiguous(), None


def _capped(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda score, batch, head, query, key: cap * torch.tanh(score / cap)
