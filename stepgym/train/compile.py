"""Decoder layers compiled by torch.compile: fewer kernels, fewer passes over memory, the same gradient up to rounding.

One layer is compiled, not the model: all layers of a kind share the code, so it takes seconds however deep the model
is, and what is done around a layer (sharding, checkpoints) stays outside. Lengths are left open, so a new one does not
compile again.

On CUDA the kernel for forests (`stepgym.train.attention.flex`) becomes part of the layer. That on the CPU (`segments`)
is called as it is, between two compiled halves. Untested on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stepgym.train.attention.flex import FlexPlan, allow_variants


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile layers where they compute forests; the first forest compiles them. Names and weights stay as they are.

    Anything else, such as sampling by an engine that shares the model, goes the plain way, since each length of a
    cache would compile anew.

    Args:
        layers: Decoder layers of a `transformers` model, before or after they are sharded.
    """
    for layer in layers:
        if not isinstance(layer.forward, _CompiledForward):
            layer.forward = _CompiledForward(layer)
    allow_variants()


class _CompiledForward:
    """Stands in for a layer's `forward`, below the hooks that torch calls around it."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        windows: list[Any] = [getattr(module, "sliding_window", None) for module in layer.modules()]
        self._windows = {window for window in windows if window is not None}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        forward = type(self._layer).forward
        plan = options.get("stepgym_tree")
        if plan is None:
            return forward(self._layer, *inputs, **options)
        if isinstance(plan, FlexPlan):
            for window in self._windows:  # what is made from numpy is made before, not in what is compiled
                plan.mask(window)
        return _compiled(forward)(self._layer, *inputs, **options)


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward)
    return compiled
