"""A growing sequence of token ids whose prefixes can be looked at without copying."""

from __future__ import annotations

import numpy as np

from stepgym.record.step import Ids


class TokenBuffer:
    """Append-only int32 ids. A conversation of any number of turns costs memory linear in its tokens.

    Every prompt of a conversation that only grows is a prefix of the same buffer; `prefix` and `tail` give read-only
    views that stay valid for ever, because what was written is never written again.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._ids = np.empty(capacity, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, ids: Ids | list[int]) -> None:
        """Add ids at the end."""
        end = self._length + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), dtype=np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : end] = ids
        self._length = end

    def prefix(self, length: int) -> Ids:
        """int32 view of the first `length` ids."""
        return _read_only(self._ids[:length])

    def tail(self, start: int) -> Ids:
        """int32 view of the ids from `start` to the present end."""
        return _read_only(self._ids[start : self._length])


def _read_only(view: Ids) -> Ids:
    view.flags.writeable = False
    return view
