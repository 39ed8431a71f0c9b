"""Named tensors in files, written and read by all ranks, each its shards; on any number of ranks again.

By torch's distributed checkpoints (DCP) in its safetensors form. DCP's own form keeps its index, and whatever is no
tensor, as pickles and reads them without a check; safetensors files hold tensors and their shapes and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from stepgym.errors import UserError
from stepgym.train.parallel.processes import Processes

T = TypeVar("T")

FILE_BYTES = 2 * 2**30
"""About how many bytes of tensors, before sharding, go to one file. A file is put together in main memory."""


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, processes: Processes) -> None:
    """Write tensors to a folder. Collective.

    Args:
        tensors: By name. Of a sharded one each rank writes its shards; a plain one that several ranks have under one
            name must be the same on all of them, and is written once; one that only one rank has is written by it.
        folder: There already, and seen by all ranks.
        processes: The ranks.

    Raises:
        OSError: A file cannot be written.
    """
    sizes: dict[str, int] = {}
    for mine in processes.gather({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}):
        sizes |= mine
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, fqn_to_index_mapping=_files(sizes))
    dense = {name: tensor if isinstance(tensor, DTensor) else tensor.contiguous() for name, tensor in tensors.items()}
    _call(lambda: save(dense, storage_writer=writer, **_among(processes)))


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, processes: Processes) -> None:
    """Read tensors, in place, whatever the number of ranks that wrote them. Collective.

    What is there but not asked for is left alone.

    Raises:
        UserError: One is missing, or has another shape or type; nothing has been changed then. Or a file cannot be
            read.
    """
    fault = processes.together(lambda: _fault(tensors, saved_tensors(folder)))
    if told := [found for found in processes.gather(fault) if found]:
        raise UserError(f"checkpoint {folder}: {told[0]}")
    reader = HuggingFaceStorageReader(str(folder))
    try:
        _call(lambda: load(dict(tensors), storage_reader=reader, **_among(processes)))
    except Exception as error:  # of many types: what a damaged file makes of torch and safetensors
        raise UserError(f"checkpoint {folder}: it cannot be read: {_first_line(error)}") from error


def saved_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of the tensors of a folder, by name. Raises `UserError` where it cannot be read."""
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise UserError(f"checkpoint {folder}: it cannot be read: {_first_line(error)}") from error
    kept = {name: tensor for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}
    return {name: (tensor.size, tensor.properties.dtype) for name, tensor in kept.items()}


def _fault(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, tuple[torch.Size, torch.dtype]]) -> str:
    """What of `tensors` does not fit what is saved, in words; empty where all does."""
    for name, tensor in tensors.items():
        if name not in saved:
            return f"{name} is not in it"
        shape, dtype = saved[name]
        if tensor.shape != shape:
            return f"{name} is {list(shape)} in it and {list(tensor.shape)} here"
        if tensor.dtype != dtype:
            return f"{name} is {_plain(dtype)} in it and {_plain(tensor.dtype)} here"
    return ""


def _files(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor goes to; the same on every rank."""
    numbers: dict[str, int] = {}
    number, room = 1, FILE_BYTES
    for name, size in sorted(sizes.items()):
        if size > room and room < FILE_BYTES:
            number, room = number + 1, FILE_BYTES
        numbers[name] = number
        room -= size
    return numbers


def _among(processes: Processes) -> dict[str, Any]:
    return {"no_dist": True} if processes.size == 1 else {"process_group": processes.group}


def _call(function: Callable[[], T]) -> T:
    """Call DCP; an error of a rank is that error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # with one process it is
            return function()
    except CheckpointException as error:
        first: Iterable[BaseException] = (failure[0] for failure in error.failures.values())
        raise next(iter(first)) from error


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]
