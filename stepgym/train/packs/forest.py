"""Micro-batches that are prefix forests: every unique token once, as far as the budget allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.train.packs.batch import Batch, Path
from stepgym.train.packs.cutting import PrefixOrder, best_cut, prefix_order
from stepgym.train.packs.micro_batch import Layout, MicroBatch, Tree


def forests(batch: Batch, layout: Layout, budget: int) -> Iterator[MicroBatch]:
    """Cut a batch into forests of at most `budget` nodes; a longer path is a forest of its own.

    The nodes are those of `stepgym.record.TokenTree`, without the ones that predict nothing that is trained.

    Args:
        batch: Paths and trained tokens.
        layout: What shares a prefix.
        budget: Most nodes of a forest.
    """
    paths = batch.paths
    keys = {
        "tree": [0] * len(paths),
        "merged": [path.chain for path in paths],
        "steps": list(range(len(paths))),
    }[layout]
    order, ranges = best_cut(prefix_order([path.ids for path in paths], keys), budget)
    for start, end in ranges:
        yield _forest(paths, order, start, end, batch.tokens.temperature)


def _forest(
    paths: Sequence[Path], order: PrefixOrder, first: int, last: int, temperature: NDArray[np.float32]
) -> MicroBatch:
    """The forest of a range of sorted paths, walked with the nodes on the way from the root."""
    chosen = [paths[index] for index in order.order[first:last]]
    length = order.length[first:last]
    shared = order.shared[first:last].copy()
    shared[0] = 0
    added = length - shared
    new = np.concatenate([[0], np.cumsum(added)])
    size = int(new[-1])
    ids = np.empty(size, dtype=np.int64)
    end = np.full(size, size, dtype=np.int32)
    way = np.empty(int(length.max()), dtype=np.int64)
    place: list[NDArray[np.int64]] = []
    before = 0
    for rank, path in enumerate(chosen):
        keep, stop = int(shared[rank]), int(length[rank])
        ids[new[rank] : new[rank + 1]] = path.ids[keep:]
        end[way[keep:before]] = new[rank]
        way[keep:stop] = np.arange(new[rank], new[rank + 1])
        place.append(way[path.position - 1])
        before = stop
    depth = np.arange(size) - np.repeat(new[:-1] - shared, added)
    token = np.concatenate([np.arange(path.token, path.token + len(path.position)) for path in chosen])
    return _with_targets(
        ids,
        depth,
        Tree.of(end),
        np.concatenate(place),
        np.concatenate([path.target for path in chosen]),
        token,
        temperature,
    )


def _with_targets(
    ids: NDArray[np.int64],
    depth: NDArray[np.int64],
    tree: Tree,
    place: NDArray[np.int64],
    target: NDArray[np.int32],
    token: NDArray[np.int64],
    temperature: NDArray[np.float32],
) -> MicroBatch:
    """The micro-batch in which equal predictions (place, target and temperature) are made once."""
    own = temperature[token]
    key = place << 32 | target
    if not (own == own[0]).all():
        key = np.stack([key, own.view(np.int32).astype(np.int64)], axis=1)
    _, index, which = np.unique(key, axis=0, return_index=True, return_inverse=True)
    if len(index) < len(token):
        place, target, own = place[index], target[index], own[index]
    return MicroBatch(
        ids=torch.from_numpy(ids)[None],
        position=torch.from_numpy(depth)[None],
        tree=tree,
        place=torch.from_numpy(place),
        target=torch.from_numpy(target.astype(np.int64)),
        temperature=None if (own == 1).all() else torch.from_numpy(own),
        token=torch.from_numpy(token),
        which=torch.from_numpy(which.reshape(-1)) if len(index) < len(token) else None,
    )
