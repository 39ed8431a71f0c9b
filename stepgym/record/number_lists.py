"""Columns of lists of numbers: numpy arrays to Arrow and back, none of the numbers touched by Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class Numbers(NamedTuple):
    """A list column of numbers: the values of all rows, and the length of each row, None for null."""

    values: NDArray[Any]
    lengths: list[int | None]


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int32]:
    """int32 offsets [N + 1] of N lists of those lengths."""
    return np.cumsum([0, *lengths], dtype=np.int64).astype(np.int32)


def numbers_of(arrays: Sequence[NDArray[Any] | None], dtype: Any) -> Numbers:
    """A list column with one row for each array, null where it is None."""
    values = np.concatenate([np.empty(0, dtype), *(a for a in arrays if a is not None)]).astype(dtype, copy=False)
    return Numbers(values, [None if a is None else len(a) for a in arrays])


def number_lists(columns: Sequence[Numbers], kind: pa.ListType) -> pa.ListArray:
    """A list column, null where a length is None; no number is touched by Python."""
    dtype = kind.value_type.to_pandas_dtype()
    values = np.concatenate([np.empty(0, dtype), *(column.values for column in columns)])
    lengths = list(chain.from_iterable(column.lengths for column in columns))
    offsets = offsets_of(length or 0 for length in lengths)
    mask = pa.array([length is None for length in lengths], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type), mask=mask)


def own(array: NDArray[Any] | None) -> NDArray[Any] | None:
    """A copy: a view would keep the whole table in memory for as long as one trajectory of it is used."""
    return None if array is None else array.copy()


class ListColumn:
    """Rows of a list column as numpy views, None where null."""

    def __init__(self, column: pa.ListArray) -> None:
        self._offsets = np.asarray(column.offsets)
        self._values = column.values.to_numpy(zero_copy_only=True)
        self._valid = np.asarray(column.is_valid())

    def __getitem__(self, row: int) -> NDArray[Any] | None:
        if not self._valid[row]:
            return None
        return self._values[self._offsets[row] : self._offsets[row + 1]]  # type: ignore[no-any-return]
