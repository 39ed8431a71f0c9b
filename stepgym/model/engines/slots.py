"""Slots: the keys and values of many token sequences, each in a row of its own, and attention over them.

A slot belongs to one running request, or keeps what a finished one left behind, so that the next prompt of the same
conversation, which extends it token for token, only computes what is new. Nothing is padded: a forward pass takes the
new tokens of all requests one after the other, as one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stepgym.record.step import Ids

ATTENTION_NAME = "stepgym_slots"
SMALLEST_CAPACITY = 256
WORTH_COPYING = 16
# Starting one more block of attention costs about as much as reading this many cached tokens (measured on CPU).
BLOCK_COST = 800


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The new tokens of one slot in a forward pass: `ids` go to positions `start, start + 1, ...`."""

    slot: int
    start: int
    ids: Ids


class SlotTable:
    """Which tokens each slot holds, and which slots are in use. Knows nothing of tensors.

    Attributes:
        ids: int32 array [slots, capacity], the tokens of each slot.
        filled: int64 array [slots], how many of them the cache has computed.
        active: bool array [slots], whether a request runs in it.
    """

    def __init__(self, slots: int) -> None:
        self.ids: Ids = np.zeros((slots, SMALLEST_CAPACITY), dtype=np.int32)
        self.filled = np.zeros(slots, dtype=np.int64)
        self.active = np.zeros(slots, dtype=np.bool_)
        self._used_at = np.zeros(slots, dtype=np.int64)
        self._clock = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return int(self.ids.shape[1])

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens in every slot."""
        if capacity > self.capacity:
            ids = np.zeros((len(self.ids), capacity), dtype=np.int32)
            ids[:, : self.capacity] = self.ids
            self.ids = ids

    def clear(self) -> None:
        """Forget what has been computed, for running requests too: the weights have changed. Tokens stay."""
        self.filled[:] = 0

    def release(self, slot: int, *, keep: bool) -> None:
        """Take the slot from its request; `keep` leaves its contents for a prompt that extends them."""
        self._clock += 1
        self.active[slot] = False
        self._used_at[slot] = self._clock
        if not keep:
            self.filled[slot] = 0

    def claim(self, prompt: Ids, *, copies: bool) -> tuple[int, int, int | None] | None:
        """Take a slot for `prompt`; None when every slot runs a request.

        Args:
            prompt: int32 ids, at least one. One token at least is always left to compute: its logits are needed.
            copies: Whether the prefix of one slot may be copied to another, and a slot be cut back to a prefix.

        Returns:
            `(slot, reused, source)`: how many tokens of the prompt are in the cache already, and the slot that they
            must be copied from (None: they are in place).
        """
        idle = np.flatnonzero(~self.active)
        if len(idle) == 0:
            return None
        shared = self._shared_with(prompt)
        whole = idle[(self.filled[idle] > 0) & (shared[idle] == self.filled[idle])]
        extended = int(whole[np.argmax(shared[whole])]) if len(whole) else -1
        gain = int(shared[extended]) if len(whole) else 0
        best = int(np.argmax(shared))
        source = None
        if copies and shared[best] >= gain + WORTH_COPYING:
            slot, gain = self._emptiest(idle), int(shared[best])
            source = None if slot == best else best
        else:
            slot = extended if len(whole) else self._emptiest(idle)
        self.active[slot] = True
        self.filled[slot] = gain
        self.ids[slot, : len(prompt)] = prompt
        return slot, gain, source

    def _emptiest(self, idle: NDArray[np.int64]) -> int:
        """The first idle slot that holds nothing, else the one that was left first."""
        empty = idle[self.filled[idle] == 0]
        return int(empty[0]) if len(empty) else int(idle[np.argmin(self._used_at[idle])])

    def longest_prefix(self, prompt: Ids) -> int:
        """How many tokens of `prompt` some slot has computed."""
        return int(self._shared_with(prompt).max())

    def _shared_with(self, prompt: Ids) -> NDArray[np.int64]:
        """int64 [slots]: length of the common prefix of each slot's computed tokens and the prompt but its last."""
        limit = np.minimum(self.filled, len(prompt) - 1)
        width = int(limit.max())
        shared = np.zeros(len(limit), dtype=np.int64)
        rows = np.flatnonzero(limit)
        if len(rows) == 0:
            return shared
        # Most slots differ early: look at a few tokens of all before looking at all tokens of a few.
        for end in (min(width, 32), width):
            different = self.ids[rows, :end] != prompt[:end]
            first = np.where(different.any(axis=1), different.argmax(axis=1), end)
            shared[rows] = np.minimum(first, limit[rows])
            rows = rows[(first == end) & (limit[rows] > end)]
            if len(rows) == 0:
                break
        return shared


class SlotCache:
    """Keys and values per layer, [slots * heads, capacity, width], made when a layer first writes, grown on demand."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.capacity = SMALLEST_CAPACITY
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def grow(self, capacity: int, filled: Sequence[int]) -> None:
        """Make room for `capacity` tokens in every slot; `filled` says how many there are in each."""
        if capacity <= self.capacity:
            return
        for layer, pair in self._layers.items():
            grown = []
            for old in pair:
                new = _zeros(old, (old.shape[0], capacity, old.shape[2]))
                rows, before = (t.view(self.slots, -1, t.shape[1], t.shape[2]) for t in (new, old))
                for slot, length in enumerate(filled):
                    if length:
                        rows[slot, :, :length] = before[slot, :, :length]
                grown.append(new)
            self._layers[layer] = (grown[0], grown[1])
        self.capacity = capacity

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        for pair in self._layers.values():
            for tensor in pair:
                heads = tensor.shape[0] // self.slots
                rows = tensor.view(self.slots, heads, self.capacity, -1)
                rows[target, :, :length] = rows[source, :, :length]

    def write(self, layer: int, keys: Tensor, values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values [tokens, heads, width] of new tokens; returns the layer's storage."""
        pair = self._layers.get(layer)
        if pair is None:
            # Zeros, not empty: a masked position has weight 0, and 0 times whatever was in memory may be NaN.
            rows = self.slots * keys.shape[1]
            pair = (
                _zeros(keys, (rows, self.capacity, keys.shape[2])),
                _zeros(values, (rows, self.capacity, values.shape[2])),
            )
            self._layers[layer] = pair
        for storage, new in zip(pair, (keys, values), strict=True):
            storage.view(-1, new.shape[2]).index_copy_(0, index, new.reshape(-1, new.shape[2]))
        return pair


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of the type and on the device of `like`. On the CPU they take memory only where they are written to."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Neighbouring slots that decode one token each, attended to at once."""

    first: int
    last: int  # exclusive
    rows: slice
    within: Tensor | None  # which of the block's slots the rows are; None: all of them
    length: int
    positions: Tensor  # int64 [last - first], position of the newest token
    ragged: bool  # whether the positions differ


class SlotBatch:
    """One forward pass: where its tokens are written, and what each attends to.

    Args:
        cache: Where keys and values live.
        decoding: Slots with one new token each, ascending, and the positions of those tokens (both int64 [n]).
        segments: Slots with several new tokens. In the pass their tokens come after those of `decoding`.
    """

    def __init__(
        self,
        cache: SlotCache,
        decoding: tuple[NDArray[np.int64], NDArray[np.int64]],
        segments: Sequence[Segment],
    ) -> None:
        self._cache = cache
        slots, positions = decoding
        self._segments = segments
        self._decoded = len(slots)
        counts = [len(s.ids) for s in segments]
        all_slots = np.concatenate([slots, np.repeat([s.slot for s in segments], counts)]).astype(np.int64)
        spans = [np.arange(s.start, s.start + len(s.ids)) for s in segments]
        self.positions: NDArray[np.int64] = np.concatenate([positions, *spans]).astype(np.int64)
        self._slots = torch.from_numpy(all_slots).to(cache.device)
        self._positions = torch.from_numpy(self.positions).to(cache.device)
        self._write_index: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._blocks = [self._block(*bounds, slots, positions) for bounds in _block_bounds(slots, positions + 1)]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of every new token to its own slot.

        `query` [1, heads, tokens, width], `key` and `value` [1, key heads, tokens, width], positions already encoded.
        Returns [1, tokens, heads, width of values].
        """
        heads, key_heads = query.shape[1], key.shape[1]
        index = self._index(key_heads)
        keys, values = self._cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), index)
        queries = query[0].transpose(0, 1)
        out = queries.new_empty(queries.shape[0], heads, values.shape[2])
        for number, block in enumerate(self._blocks):
            q = queries[block.rows] * scaling
            if block.within is not None:
                spread = q.new_zeros(block.last - block.first, heads, q.shape[2])
                spread[block.within] = q
                q = spread
            n = q.shape[0]
            q = q.reshape(n * key_heads, heads // key_heads, -1)
            area = slice(block.first * key_heads, block.last * key_heads)
            scores = torch.bmm(q, keys[area, : block.length].transpose(1, 2))
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            mask = self._block_mask(number, window)
            if mask is not None:
                scores.view(n, heads, block.length).masked_fill_(mask, float("-inf"))
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
            result = torch.bmm(weights, values[area, : block.length]).view(n, heads, -1)
            out[block.rows] = result if block.within is None else result[block.within]
        at = self._decoded
        for number, segment in enumerate(self._segments):
            count, end = len(segment.ids), segment.start + len(segment.ids)
            area = slice(segment.slot * key_heads, (segment.slot + 1) * key_heads)
            out[at : at + count] = _attend_segment(
                queries[at : at + count].transpose(0, 1),
                keys[area, :end],
                values[area, :end],
                self._segment_mask(number, window, needed=softcap is not None),
                scaling,
                softcap,
            ).transpose(0, 1)
            at += count
        return out.unsqueeze(0)

    def _index(self, heads: int) -> Tensor:
        """Where each (token, head) of this pass is written: int64 [tokens * heads]."""
        index = self._write_index.get(heads)
        if index is None:
            rows = self._slots[:, None] * heads + torch.arange(heads, device=self._cache.device)
            index = (rows * self._cache.capacity + self._positions[:, None]).flatten()
            self._write_index[heads] = index
        return index

    def _block(self, start: int, stop: int, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> _Block:
        first, last = int(slots[start]), int(slots[stop - 1]) + 1
        length = int(positions[start:stop].max()) + 1
        within = None
        # A slot in between that does not decode now attends to everything, and its result is left out.
        newest = np.full(last - first, length - 1, dtype=np.int64)
        newest[slots[start:stop] - first] = positions[start:stop]
        if stop - start < last - first:
            within = torch.from_numpy(slots[start:stop] - first).to(self._cache.device)
        tensor = torch.from_numpy(newest).to(self._cache.device)
        return _Block(first, last, slice(start, stop), within, length, tensor, bool((newest < length - 1).any()))

    def _block_mask(self, number: int, window: int | None) -> Tensor | None:
        """True where a block's slot does not attend: [n, 1, length]; None where it attends to all."""
        key = (number, window)
        if key not in self._masks:
            block = self._blocks[number]
            narrow = window is not None and window < block.length
            if not (block.ragged or narrow):
                self._masks[key] = None
                return None
            there = torch.arange(block.length, device=self._cache.device)
            newest = block.positions[:, None]
            mask = there > newest
            if window is not None and narrow:
                mask |= there <= newest - window
            self._masks[key] = mask[:, None, :]
        return self._masks[key]

    def _segment_mask(self, number: int, window: int | None, *, needed: bool) -> Tensor | None:
        """True where a segment's token attends: [new tokens, all tokens]; None: causal, from the slot's beginning."""
        segment = self._segments[number]
        end = segment.start + len(segment.ids)
        if segment.start == 0 and not needed and (window is None or end <= window):
            return None
        key = (-1 - number, window)
        if key not in self._masks:
            there = torch.arange(end, device=self._cache.device)
            own = torch.arange(segment.start, end, device=self._cache.device)[:, None]
            mask = there <= own
            if window is not None:
                mask &= there > own - window
            self._masks[key] = mask
        return self._masks[key]


def _attend_segment(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of one slot's new tokens: `query` [heads, new, width] over `keys` [key heads, all, width]."""
    repeats = query.shape[0] // keys.shape[0]
    if repeats > 1:
        keys, values = (t.repeat_interleave(repeats, dim=0) for t in (keys, values))
    if softcap is not None and mask is not None:
        scores = softcap * torch.tanh(torch.matmul(query, keys.transpose(1, 2)) * scaling / softcap)
        weights = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1, dtype=torch.float32)
        return torch.matmul(weights.to(values.dtype), values)
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=scaling
    )[0]


def _block_bounds(slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut ascending slots into runs to attend to at once, so that little is read in vain and few blocks are started.

    A block reads its longest length in each of its slots, those in between included.
    """
    bounds: list[tuple[int, int]] = []
    start, first, longest = 0, 0, 0
    pairs = list(zip(slots.tolist(), lengths.tolist(), strict=True))
    for at, (slot, length) in enumerate(pairs):
        if at == start:
            first, longest = slot, length
            continue
        together = (slot + 1 - first) * max(longest, length)
        apart = (pairs[at - 1][0] + 1 - first) * longest + length + BLOCK_COST
        if together > apart:
            bounds.append((start, at))
            start, first, longest = at, slot, length
        else:
            longest = max(longest, length)
    if pairs:
        bounds.append((start, len(pairs)))
    return bounds


def register_attention() -> None:
    """Tell `transformers` of this attention. It acts where a forward pass gets `slot_batch`, and only there."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _slot_attention)


def _slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    batch = options.get("slot_batch")
    if batch is None:
        raise RuntimeError(f"{ATTENTION_NAME}: this attention needs slot_batch")
    if options.get("s_aux") is not None or options.get("position_bias") is not None:
        raise RuntimeError(f"{ATTENTION_NAME}: attention sinks and position biases are not supported")
    out = batch.attend(
        module.layer_idx,
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out, None
