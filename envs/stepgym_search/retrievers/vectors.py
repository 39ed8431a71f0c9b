"""FAISS indexes as files: written chunk by chunk, mapped into memory when they are opened."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError

Vectors = NDArray[np.float32]

HNSW_NEIGHBOURS = 32
HNSW_EF_CONSTRUCTION = 200
HNSW_EF_SEARCH = 128

_FLAT_HEADER = struct.Struct("<4siqqqBiQ")  # kind, dimension, rows, two unused, trained, metric, numbers that follow
_UNUSED = 1 << 20


def faiss_library() -> ModuleType:
    """The module faiss. Raises `UserError` where it is not installed."""
    try:
        import faiss
    except ImportError:
        raise UserError("the retriever dense needs the package 'faiss-cpu': pip install 'stepgym[search]'") from None
    module: ModuleType = faiss
    return module


def write_flat(path: Path, dimension: int, chunks: Iterable[Vectors]) -> int:
    """Write an `IndexFlatIP` file, byte for byte as `faiss.write_index` does, without ever holding it in memory.

    Args:
        path: The file.
        dimension: Length of a vector.
        chunks: The vectors in order, each of shape (n, dimension).

    Returns:
        The number of vectors.
    """
    rows = 0
    with path.open("wb") as file:
        file.write(bytes(_FLAT_HEADER.size))
        for chunk in chunks:
            file.write(np.ascontiguousarray(chunk, dtype="<f4").data)
            rows += len(chunk)
        file.seek(0)
        inner_product = faiss_library().METRIC_INNER_PRODUCT
        file.write(_FLAT_HEADER.pack(b"IxFI", dimension, rows, _UNUSED, _UNUSED, 1, inner_product, rows * dimension))
    return rows


def write_hnsw(path: Path, dimension: int, chunks: Iterable[Vectors]) -> int:
    """Write an `IndexHNSWFlat` of inner products, which is built in memory. Returns the number of vectors."""
    faiss = faiss_library()
    index = faiss.IndexHNSWFlat(dimension, HNSW_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    for chunk in chunks:
        index.add(chunk)
    faiss.write_index(index, str(path))
    return int(index.ntotal)


class VectorIndex:
    """A FAISS index of any kind, opened from a file, that is searched for the vectors nearest to others.

    Vectors that are stored as they are, and the lists of an inverted file, are mapped into memory: opening costs
    little, and processes share them. The file is read ahead in the background.

    Args:
        path: The file.
        parameters: What to search it with, in FAISS's words, as `nprobe=64` or `efSearch=256`. By default an HNSW
            graph is searched with `efSearch=128`, other kinds as FAISS does.

    Attributes:
        dimension: Length of a vector.
        rows: Number of vectors.

    Raises:
        UserError: The file is missing or no FAISS index, or does not know a parameter.
    """

    def __init__(self, path: Path, parameters: str = "") -> None:
        faiss = faiss_library()
        if not path.is_file():
            raise UserError(f"there is no index at {path}")
        try:
            self._index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except (RuntimeError, MemoryError) as error:
            raise UserError(f"{path} is no index of FAISS, or a damaged one: {_reason(error)}") from None
        self.dimension = int(self._index.d)
        self.rows = int(self._index.ntotal)
        self._sign = 1.0 if self._index.metric_type == faiss.METRIC_INNER_PRODUCT else -1.0
        if not parameters and isinstance(faiss.downcast_index(self._index), faiss.IndexHNSW):
            parameters = f"efSearch={HNSW_EF_SEARCH}"
        if parameters:
            try:
                faiss.ParameterSpace().set_index_parameters(self._index, parameters)
            except RuntimeError as error:
                raise UserError(
                    f"search: retriever: {path.name} cannot be searched with {parameters!r}: {_reason(error)}"
                ) from None
        threading.Thread(target=_read_ahead, args=(path,), name="stepgym-read-ahead", daemon=True).start()

    def search(self, vectors: Vectors, k: int) -> tuple[Vectors, NDArray[np.int64]]:
        """The nearest rows to each vector, best first: their scores (higher is nearer) and numbers, shape (n, k).

        Where there are fewer than k, the numbers end with -1.
        """
        scores, rows = self._index.search(vectors, k)
        return scores * np.float32(self._sign), rows

    def vector(self, row: int) -> Vectors | None:
        """The vector of a row as it is stored; None where this kind of index cannot tell."""
        try:
            vector: Vectors = self._index.reconstruct(row)
        except RuntimeError:
            return None
        return vector


def _read_ahead(path: Path) -> None:
    """Let the system read the file into its cache, if it fits: FAISS maps it as if it were read here and there."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size < memory // 2:
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        pass  # it is read when it is needed


def _reason(error: BaseException) -> str:
    """What FAISS says, in one line, without the place in its sources."""
    text = " ".join(str(error).split())
    return (text.rpartition("Error: ")[2] or type(error).__name__)[:200]
