"""The rows of a store, shard by shard: trajectories, and what is wrong with rows that are none.

Rows are read in batches, so memory stays flat. Lengths are compared before steps are made of them, because a step
refuses a mask that does not fit its response, and a store would refuse the whole shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.inspect.audit.check import Fault
from stepgym.inspect.audit.checks.records import LENGTHS, UNREADABLE
from stepgym.record.json_text import load_text
from stepgym.record.schema import SCHEMA, STEP_TYPE, from_table
from stepgym.record.trajectory import Trajectory

BATCH = 64
"""Rows that are read at a time."""


class BadRow(NamedTuple):
    """A row that is no trajectory: its id, and what is wrong with it, as (check, fault)."""

    id: str
    faults: Sequence[tuple[str, Fault]]


def read_rows(shards: Sequence[Path], phases: Collection[str] = ()) -> Iterator[Trajectory | BadRow]:
    """Every row of some shards, copies of one id included.

    Args:
        shards: Parquet files with the store's schema.
        phases: Only these; all where there are none.

    Raises `UserError` for a file that cannot be read, which is named.
    """
    for shard in shards:
        try:
            with pq.ParquetFile(shard) as file:
                for batch in file.iter_batches(batch_size=BATCH, columns=SCHEMA.names):
                    table = pa.Table.from_batches([batch])
                    if phases:
                        table = table.filter(pc.is_in(table.column("phase"), pa.array(sorted(phases), pa.string())))
                    yield from _read_batch(table.select(SCHEMA.names).cast(SCHEMA.remove_metadata()))
        except (pa.ArrowException, OSError, KeyError) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"{shard}: cannot read this trajectory shard: {reason}") from None


def _read_batch(table: pa.Table) -> Iterator[Trajectory | BadRow]:
    if not len(table):
        return
    bad = _wrong_lengths(table)
    if not bad:
        try:
            yield from from_table(table)
            return
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError):
            pass  # one of the rows: which one shows when they are read one by one
    for row in range(len(table)):
        one = table.slice(row, 1)
        if row in bad:
            yield BadRow(_id(one), [(LENGTHS, fault) for fault in bad[row]])
            continue
        try:
            yield from from_table(pa.Table.from_batches([one.combine_chunks().to_batches()[0]]))
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            yield BadRow(_id(one), [(UNREADABLE, Fault(f"the row is no trajectory: {reason}"))])


def _id(row: pa.Table) -> str:
    return load_text(row.column("id")[0].as_py() or "")


def _wrong_lengths(table: pa.Table) -> dict[int, list[Fault]]:
    """Faults by row, for steps whose lists do not fit their response."""
    column: Any = table.column("steps").combine_chunks()
    chunk = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    offsets = np.asarray(chunk.offsets)
    struct = chunk.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    fields: dict[str, Any] = dict(zip((f.name for f in STEP_TYPE), struct.flatten(), strict=True))
    response = _list_lengths(fields["response_ids"])
    found: dict[int, list[Fault]] = {}
    for name in ("loss_mask", "logprobs"):
        lengths = _list_lengths(fields[name])
        for place in np.flatnonzero((lengths != response) & (lengths >= 0)):
            row = int(np.searchsorted(offsets - offsets[0], place, side="right")) - 1
            step = int(place - (offsets[row] - offsets[0]))
            have = f"{lengths[place]} entries for {max(0, int(response[place]))} response tokens"
            found.setdefault(row, []).append(Fault(f"{name} has {have}", step=step))
    return found


def _list_lengths(column: pa.ListArray) -> NDArray[np.int64]:
    """Length of each list, -1 where there is none."""
    return np.asarray(pc.fill_null(pc.list_value_length(column), -1)).astype(np.int64)
