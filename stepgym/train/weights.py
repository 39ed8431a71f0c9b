"""Weights in and out: whole tensors of a model, sharded or not, under the names that others read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from stepgym.model.progress_bars import quiet_transformers
from stepgym.train.lora import Adapter


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as every rank would see it without sharding. Collective where it is sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_tensors(model: Any, adapter: Adapter | None) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of a model, one after the other, under its own names; an adapter is merged. Collective."""
    tensors = model.state_dict().items() if adapter is None else adapter.merged()
    for name, tensor in tensors:
        yield name, whole(tensor)


@torch.no_grad()
def published_tensors(model: Any, adapter: Adapter | None) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights under the names of a Hugging Face model folder, tied ones once; an adapter is merged. Collective."""
    from transformers.core_model_loading import revert_weight_conversion

    shared = tied_names(model)
    state = {name: tensor for name, tensor in whole_tensors(model, adapter) if name not in shared}
    yield from revert_weight_conversion(model, state).items()


def tied_names(model: Any) -> dict[str, str]:
    """Weights that are another weight under a second name: second name to first."""
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.replace(".base_layer.", ".")
        original = first.setdefault(id(parameter), plain)
        if original != plain:
            again[plain] = original
    return again


def save_model(
    model: Any,
    adapter: Adapter | None,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "50GB",
    write: bool = True,
) -> None:
    """Write a model as a folder that `transformers` and servers load; an adapter is merged into its weights.

    Collective where the model is sharded.

    Args:
        model: The model.
        adapter: Its adapter, or None.
        folder: Made where there is none.
        dtype: Type of the weights on disk; None: their own.
        max_shard_size: Bytes of one file at most.
        write: Whether this process writes; the others only take part.
    """
    state = gathered(whole_tensors(model, adapter), keep=write, dtype=dtype)
    if state is not None:
        write_weights(model, state, folder, max_shard_size=max_shard_size)


@torch.no_grad()
def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor] | None:
    """Whole tensors by name in main memory, floats in `dtype`, where `keep`; None on ranks that only take part."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        full = whole(tensor)
        if keep:
            state[name] = full.detach().to(device="cpu", dtype=dtype if full.is_floating_point() else None)
    return state if keep else None


def write_weights(
    model: Any, state: dict[str, torch.Tensor], folder: str | Path, *, max_shard_size: int | str = "50GB"
) -> None:
    """Write gathered weights, under the model's own names, as a folder that `transformers` and servers load."""
    for alias, original in tied_names(model).items():
        state[alias] = state[original]  # one storage is saved once
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
