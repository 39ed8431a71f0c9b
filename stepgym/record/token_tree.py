"""Steps as one prefix tree, in which every unique token stands once.

Turns repeat their history, and the samples of a group repeat their prompt. In the tree a token that many steps share
is one *node*; what a step sampled is a set of *occurrences* that point at nodes. The forward pass of a trainer runs
over nodes, the loss over occurrences, so sharing changes what is computed and never what is learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.record.delta import common_prefix
from stepgym.record.step import Ids, Step
from stepgym.record.trajectory import Trajectory


class TokenTree:
    """The prefix forest of some steps: those of a trajectory, of a group, of a batch.

    Nodes are numbered depth first, so a subtree is a range of numbers: `q` attends to `k` exactly when
    `k <= q < end[k]`, and a node's position is its depth. Children are in the order of their token ids, so equal
    steps in any order give equal arrays. With N nodes, S steps and M occurrences:

    Attributes:
        tokens: int32 [N], the token of each node.
        depth: int32 [N], its position, 0 for a root.
        parent: int32 [N], the node before it, -1 for a root.
        end: int32 [N], one past the last node of its subtree.
        occ_node: int32 [M], the node of each sampled token. Its logprob is predicted at `parent[occ_node]`.
        occ_step: int32 [M], the step that sampled it. Occurrences are in the order of steps and tokens.
        occ_token: int32 [M], its index in the response of that step.
        occ_loss_mask: int8 [M], the step's loss mask.
        occ_logprob: float32 [M], the sampler's logprob; NaN where the step has none.
        step_start: int64 [S + 1], the occurrences of step s are `step_start[s]:step_start[s + 1]`.
        step_node: int32 [S], the node of the last token of each step; -1 for a step without a single token.
        total_tokens: Tokens of all steps, each with its whole prompt.

    The build sorts the steps by their ids and compares each with its neighbour: linear in the tokens, all of it in
    numpy. (The numbering by depth-first intervals is that of the TRL and AReaL tree packs.)

    Raises:
        UserError: for a step without token ids (from an engine that speaks only chat).
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        texts = [_sortable_bytes(step, i) for i, step in enumerate(steps)]
        order = sorted(range(len(steps)), key=texts.__getitem__)
        raw = [np.frombuffer(texts[i], dtype=np.int32) for i in order]
        lengths = np.array([len(ids) for ids in raw], dtype=np.int64)
        shared = np.array([0, *(common_prefix(a, b) for a, b in pairwise(raw))], dtype=np.int64)[: len(raw)]
        self.total_tokens = int(lengths.sum())
        self._number_nodes(order, texts, lengths, shared)
        self._place_occurrences(steps, order, lengths, shared)

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> TokenTree:
        """The tree of all steps of the trajectories, one trajectory after the other."""
        return cls(list(chain.from_iterable(trajectory.steps for trajectory in trajectories)))

    def _number_nodes(
        self, order: list[int], texts: list[bytes], lengths: NDArray[np.int64], shared: NDArray[np.int64]
    ) -> None:
        """Tokens and depths: step after step in sorted order, each adds what it does not share with the one before."""
        added = lengths - shared
        self._first_node = np.concatenate([[0], np.cumsum(added)])
        size = int(self._first_node[-1])
        self.tokens: Ids = np.empty(size, dtype=np.int32)
        for rank, step in enumerate(order):
            start, stop = self._first_node[rank], self._first_node[rank + 1]
            self.tokens[start:stop] = np.frombuffer(texts[step], dtype=">i4", offset=4 * int(shared[rank]))
        nodes = np.arange(size, dtype=np.int32)
        self.depth: NDArray[np.int32] = nodes - np.repeat(self._first_node[:-1] - shared, added).astype(np.int32)
        self.parent: NDArray[np.int32] = nodes - 1

    def _place_occurrences(
        self, steps: Sequence[Step], order: list[int], lengths: NDArray[np.int64], shared: NDArray[np.int64]
    ) -> None:
        """Walk the sorted steps with the path from the root, which closes subtrees and finds the sampled nodes."""
        responses = [step.response_ids for step in steps]
        counts = np.array([0 if ids is None else len(ids) for ids in responses], dtype=np.int64)
        self.step_start: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)])
        self.step_node: NDArray[np.int32] = np.full(len(steps), -1, dtype=np.int32)
        self.end: NDArray[np.int32] = np.full(len(self.tokens), len(self.tokens), dtype=np.int32)
        self.occ_node: NDArray[np.int32] = np.empty(int(counts.sum()), dtype=np.int32)
        path = np.empty(int(lengths.max(initial=0)), dtype=np.int32)
        before = 0
        for rank, step in enumerate(order):
            keep, length = int(shared[rank]), int(lengths[rank])
            start, stop = int(self._first_node[rank]), int(self._first_node[rank + 1])
            self.end[path[keep:before]] = start
            if stop > start:
                path[keep:length] = np.arange(start, stop)
                self.parent[start] = path[keep - 1] if keep else -1
            if length:
                self.step_node[step] = path[length - 1]
            self.occ_node[self.step_start[step] : self.step_start[step + 1]] = path[length - counts[step] : length]
            before = length
        self.occ_step: NDArray[np.int32] = np.repeat(np.arange(len(steps), dtype=np.int32), counts)
        within = np.arange(len(self.occ_node)) - np.repeat(self.step_start[:-1], counts)
        self.occ_token: NDArray[np.int32] = within.astype(np.int32)
        masks = [step.loss_mask for step in steps if step.loss_mask is not None]
        self.occ_loss_mask: NDArray[np.int8] = np.concatenate([np.empty(0, np.int8), *masks])
        absent = [np.full(count, np.nan, dtype=np.float32) for count in counts]
        logprobs = [gap if s.logprobs is None else s.logprobs for s, gap in zip(steps, absent, strict=True)]
        self.occ_logprob: NDArray[np.float32] = np.concatenate([np.empty(0, np.float32), *logprobs])

    # ---- looking at it ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of nodes: of unique tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"TokenTree({len(self.step_node)} steps, {self.total_tokens} tokens, {len(self)} unique)"

    @overload
    def visible(self, query: int, key: int) -> bool: ...

    @overload
    def visible(self, query: NDArray[np.integer], key: NDArray[np.integer]) -> NDArray[np.bool_]: ...

    def visible(self, query: int | NDArray[np.integer], key: int | NDArray[np.integer]) -> bool | NDArray[np.bool_]:
        """Whether node `query` attends to node `key`: `key` is `query` or lies on its path. Arrays are broadcast."""
        seen = (np.asarray(key) <= query) & (query < self.end[key])
        return bool(seen) if np.ndim(seen) == 0 else seen

    @property
    def roots(self) -> NDArray[np.int64]:
        """Nodes that start a tree of the forest."""
        return np.flatnonzero(self.parent < 0)

    @property
    def leaves(self) -> NDArray[np.int64]:
        """Nodes that nothing follows."""
        return np.flatnonzero(self.end == np.arange(1, len(self) + 1))

    @property
    def branches(self) -> NDArray[np.int64]:
        """Nodes that more than one token follows."""
        children = np.bincount(self.parent[self.parent >= 0], minlength=len(self))
        return np.flatnonzero(children > 1)

    def path(self, step: int) -> NDArray[np.int64]:
        """The nodes of a step, int64 [P + R]: `tokens[path(s)]` is its prompt + response."""
        return self.path_to(int(self.step_node[step]))

    def path_to(self, node: int) -> NDArray[np.int64]:
        """The nodes from the root to a node, both included; empty for -1."""
        runs: list[NDArray[np.int64]] = []
        while node >= 0:
            # Nodes that one step added follow each other, so a path is a few ranges.
            rank = int(np.searchsorted(self._first_node, node, side="right")) - 1
            start = int(self._first_node[rank])
            runs.append(np.arange(start, node + 1))
            node = int(self.parent[start])
        return np.concatenate([np.empty(0, np.int64), *reversed(runs)])

    def paths(self) -> Iterator[NDArray[np.int64]]:
        """The path to each leaf, in the order of the leaves."""
        for leaf in self.leaves:
            yield self.path_to(int(leaf))


def _sortable_bytes(step: Step, index: int) -> bytes:
    """Prompt + response as big-endian bytes, which sort as the ids do and share bytes as the ids share tokens."""
    if step.prompt_ids is None:
        raise UserError(f"TokenTree: step {index} has no token ids: its engine speaks only chat")
    return step.full_ids.astype(">i4").tobytes()
