"""What one forward pass computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Layout: TypeAlias = Literal["tree", "merged", "steps"]
"""What shares a prefix: `tree`: all steps of an update; `merged`: steps of a trajectory that extend one another;
`steps`: nothing. The gradient is the same."""


class Tree(NamedTuple):
    """A prefix forest in depth-first order: node `q` attends to node `k` exactly when `k <= q < end[k]`.

    Attributes:
        end: int32 [N], one past the last node of each node's subtree.
        segments: int32 [S, 3], rows (start, stop, end): the maximal runs of nodes without a branch, and where their
            subtree ends. A node of the run attends to those before it in the run; every node of `[stop, end)`, and
            nothing else, attends to all of it.
    """

    end: NDArray[np.int32]
    segments: NDArray[np.int32]

    @classmethod
    def of(cls, end: NDArray[np.int32]) -> Tree:
        """The forest with these subtree ends. Nodes of a run without a branch have the same end."""
        start = np.flatnonzero(np.diff(end, prepend=-1)).astype(np.int32)
        stop = np.append(start[1:], len(end)).astype(np.int32)
        return cls(end, np.stack([start, stop, end[start]], axis=1))

    @property
    def depth(self) -> NDArray[np.int64]:
        """int64 [N], the position of each node, 0 for a root."""
        size = self.segments[:, 1] - self.segments[:, 0]
        # A segment adds its size to the depth of everything below it.
        steps = np.zeros(len(self.end) + 1, dtype=np.int64)
        np.add.at(steps, self.segments[:, 1], size)
        np.add.at(steps, self.segments[:, 2], -size)
        within = np.arange(len(self.end)) - np.repeat(self.segments[:, 0], size)
        return np.cumsum(steps)[:-1] + within

    @property
    def visible_pairs(self) -> int:
        """Pairs (query, key) that attention computes."""
        start, stop, end = self.segments.astype(np.int64).T
        size = stop - start
        return int((size * (size + 1) // 2 + size * (end - stop)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward pass: a forest of N nodes, or B padded rows.

    Attributes:
        ids: int64 tensor [1, N], the token of each node; or [B, L], rows padded on the right, which causal attention
            never sees, so no mask is needed.
        position: int64 tensor [1, N], depth of each node; None for rows.
        tree: Who attends to whom; None for rows.
        place: int64 tensor [K], flat index into `ids` of the token whose hidden state predicts.
        target: int64 tensor [K], the token that is predicted.
        temperature: float32 tensor [K], or None where all are 1.
        token: int64 tensor [M], numbers of the trained tokens in the batch's `TrainedTokens`.
        which: int64 tensor [M], which of the K predictions each of them is; None where they are one to one. Steps that
            sampled the same token after the same prefix share a prediction.
    """

    ids: torch.Tensor
    position: torch.Tensor | None
    tree: Tree | None
    place: torch.Tensor
    target: torch.Tensor
    temperature: torch.Tensor | None
    token: torch.Tensor
    which: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.ids.numel()

    @property
    def visible_pairs(self) -> int:
        """Pairs (query, key) that attention computes."""
        if self.tree is not None:
            return self.tree.visible_pairs
        rows, width = self.ids.shape
        return rows * width * (width + 1) // 2

    def at_temperature_one(self) -> MicroBatch:
        """The same, scored at temperature 1."""
        return replace(self, temperature=None)


def idle_micro_batch(*, forest: bool) -> MicroBatch:
    """One that holds no trained token: for a rank that has to take part in a pass and has nothing left to compute."""
    nothing, zero = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    tree = Tree.of(np.array([1], dtype=np.int32)) if forest else None
    return MicroBatch(
        zero[None],
        zero[None] if forest else None,
        tree,
        place=zero,
        target=zero,
        temperature=None,
        token=nothing,
        which=nothing,
    )
