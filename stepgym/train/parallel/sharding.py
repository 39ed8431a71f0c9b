"""A model over several processes: weights, gradients and optimizer state in shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stepgym.train.parallel.processes import Processes


def shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    processes: Processes,
    *,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shard a module's weights over all ranks, in place (Zhao et al. 2023, arXiv:2304.11277).

    Each layer's weights are gathered when its turn comes, and let go after it; what is in no layer (embeddings, head,
    last norm) when `module` itself is called. So all computing has to go through `module`'s own `forward`, as often on
    every rank. All ranks must come with the same weights. With one process nothing is changed.

    A gradient is the *mean* over ranks: scale a loss whose terms are dealt to ranks by their number.

    Args:
        module: What is called: holds everything that computes.
        layers: The parts of it that repeat.
        processes: The ranks.
        compute_dtype: Type in which weights are gathered and computed with; None: their own. Gradients are summed
            in float32 where that or the weights' type is narrower.
    """
    if processes.size == 1:
        return
    mesh = init_device_mesh(processes.device.type, (processes.size,))
    narrow = {compute_dtype, *(parameter.dtype for parameter in module.parameters())} & {torch.bfloat16, torch.float16}
    # The inputs are left alone: temperatures, too, would be rounded to the type of the weights.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32 if narrow else None,
        cast_forward_inputs=False,
    )
    for part in [*layers, module]:
        # The root too lets go after its forward: what is gathered without a backward pass to follow would be kept, and
        # would be stale once the weights have changed.
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)


def reduce_gradients(module: nn.Module, wanted: bool) -> None:
    """Whether the next backward passes add up gradients over ranks at once, or keep them for one that does.

    Kept gradients save communication and cost memory: each rank holds them whole. The sum is the same. Without effect
    on a module that is not sharded.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)


class FrozenWeights:
    """The weights of a model as they are now, in main memory, for a reference that is never trained.

    Of a sharded model each rank keeps its shards. While the reference computes, its weights and the model's change
    places one by one, so that no second model is ever on the device.

    Args:
        parameters: Of the model. The copies are made here.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._live = list(dict.fromkeys(parameters))
        self._kept = [_own(parameter).detach().to("cpu", copy=True) for parameter in self._live]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has these weights within, and its own again after."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def tensors(self) -> list[torch.Tensor]:
        """The kept weights (of this rank), in the order of the parameters. Copy into them to change them."""
        return self._kept

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, kept in zip(self._live, self._kept, strict=True):
            own = _own(parameter).detach()
            moved = own.to("cpu", copy=True)
            own.copy_(kept)
            kept.copy_(moved)


def _own(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
