"""A model on a device, with weights of a type."""

from __future__ import annotations

from typing import Any

import torch


def place(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move a model to a device and give its weights a type, in place; returns the model.

    Buffers that are computed and not saved, the frequencies of rotary positions above all, are never rounded to a
    narrower type: `from_pretrained` does not round them either, nor do servers, and in bfloat16 an angle is wrong by
    up to one part in 256, which at position 1000 is several radians.

    Args:
        model: A model of `transformers`.
        device: Where to.
        dtype: A floating-point type.
    """
    exact = [
        (module, name, module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    ]
    model = model.to(device=device, dtype=dtype)
    for module, name, buffer in exact:
        if buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize > dtype.itemsize:
            module._buffers[name] = buffer.to(device)
    return model
