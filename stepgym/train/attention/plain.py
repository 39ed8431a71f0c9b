"""What the kernels for forests do when a model is called without a forest: what its attention did before."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def attend_plainly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention over rows, as `transformers` calls it: torch's own, or the model's own code.

    Soft caps and attention sinks are known to the model's own code only. `attention_mask` is a mask as made for torch's
    attention: bool [B, 1, Q, K], or None for a causal one.

    Returns [B, Q, H, D].
    """
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
        )
        return found
    if attention_mask is None:
        queries, keys = query.shape[-2], key.shape[-2]
        distance = torch.arange(keys - queries, keys, device=query.device)[:, None] - torch.arange(
            keys, device=query.device
        )
        attention_mask = distance >= 0
        if sliding_window is not None:
            attention_mask &= distance < sliding_window
        attention_mask = attention_mask[None, None]
    if attention_mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, least)
    own: Any = sys.modules[type(module).__module__]
    out: tuple[Tensor, Tensor | None] = own.eager_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        **options,
    )
    return out
