"""Micro-batches that are padded rows, for models whose layers cannot branch (recurrent, linear attention).

A row is a merged sequence, or a single step; nothing is shared between rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.model.lengths import cut_by_length
from stepgym.record.step import Ids
from stepgym.train.packs.batch import Batch, Path
from stepgym.train.packs.micro_batch import Layout, MicroBatch


class _Row(NamedTuple):
    ids: Ids
    position: NDArray[np.int64]
    target: Ids
    token: NDArray[np.int64]


def padded_rows(batch: Batch, layout: Layout, budget: int) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches of at most `budget` tokens, padding included.

    Rows are sorted by length and cut where padding and the number of micro-batches together cost least. A row longer
    than the budget goes alone.

    Args:
        batch: Paths and trained tokens.
        layout: `merged` (also what `tree` falls back to) or `steps`.
        budget: Most tokens of a micro-batch.
    """
    rows = [_row([path]) for path in batch.paths] if layout == "steps" else [_row(chain) for chain in _chains(batch)]
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for start, end in cut_by_length(lengths[order], budget):
        yield _pad([rows[index] for index in order[start:end]], batch.tokens.temperature)


def _chains(batch: Batch) -> list[list[Path]]:
    chains: dict[int, list[Path]] = {}
    for path in batch.paths:
        chains.setdefault(path.chain, []).append(path)
    return list(chains.values())


def _row(chain: Sequence[Path]) -> _Row:
    return _Row(
        chain[-1].ids,
        np.concatenate([path.position for path in chain]),
        np.concatenate([path.target for path in chain]),
        np.concatenate([np.arange(path.token, path.token + len(path.position)) for path in chain]),
    )


def _pad(rows: Sequence[_Row], temperature: NDArray[np.float32]) -> MicroBatch:
    width = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
    token = np.concatenate([row.token for row in rows])
    own = temperature[token]
    return MicroBatch(
        ids=torch.from_numpy(ids),
        position=None,
        tree=None,
        place=torch.from_numpy(np.concatenate([i * width + row.position - 1 for i, row in enumerate(rows)])),
        target=torch.from_numpy(np.concatenate([row.target for row in rows]).astype(np.int64)),
        temperature=None if (own == 1).all() else torch.from_numpy(own),
        token=torch.from_numpy(token),
    )
