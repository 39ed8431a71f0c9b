"""Log-probabilities of given tokens by Liger-Kernel's fused kernel, on the GPUs that it was made for."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def liger_fits(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel can take these hidden states: bfloat16 on a Hopper GPU, and it is installed (extra `liger`).

    On other GPUs Liger-Kernel goes by chunks itself, with more memory traffic than `stepgym.model.logprobs`.
    """
    return hidden.is_cuda and len(hidden) > 0 and dtype == torch.bfloat16 and _at_hand(hidden.device)


def liger_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [K], with gradient, and entropies [K], without; float32. A plain head without bias.

    The kernel holds no logits at all. It rounds entropies, and the gradient of the weight as it sums it, to bfloat16.
    Untested on a GPU. On the CPU, where the tests run it, Liger-Kernel falls back to chunks.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    found = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, temperature, -100, 1, entropy)
    loss, entropies = found if entropy else (found, None)
    return -loss, None if entropies is None else entropies.detach().float()


def one_temperature(temperature: Tensor | None) -> float | None:
    """The temperature of all tokens, or None where they differ."""
    if temperature is None:
        return 1.0
    low, high = torch.aminmax(temperature)
    return float(low) if bool(low == high) else None


@functools.cache
def _at_hand(device: torch.device) -> bool:
    # The fused kernel is written in NVIDIA's CuTe language, which Liger-Kernel does not ask for by itself.
    installed = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "cutlass", "tvm_ffi"))
    return installed and torch.cuda.get_device_capability(device) == (9, 0)
