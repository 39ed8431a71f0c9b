"""The words of an index, as a sorted table in files: looked up where they lie, shared by all processes."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Collection
from pathlib import Path

import numpy as np

_WORDS = "vocabulary.bin"
_OFFSETS = "vocabulary.npy"


class Vocabulary:
    """The words of an index and their numbers. A word's number is its place in the order of the words' UTF-8 bytes.

    A dict of a million words costs each process that opens the index a second and a hundred megabytes; this table costs
    neither, as it is mapped into memory and searched by halving.

    Args:
        folder: Where `write` was called.

    Raises:
        OSError: A file is missing.
        ValueError: The files do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False)
        with (folder / _WORDS).open("rb") as file:
            self._words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._offsets.dtype != np.int64 or self._offsets.ndim != 1 or self._offsets[-1] != len(self._words):
            raise ValueError(f"{_OFFSETS} and {_WORDS} do not fit")

    @staticmethod
    def write(folder: Path, words: Collection[str]) -> list[str]:
        """Write the table of some words, each named once and none of them empty; at least one.

        Returns:
            The words, in the order of their numbers.
        """
        encoded = sorted(word.encode() for word in words)
        lengths = np.fromiter((len(word) for word in encoded), dtype=np.int64, count=len(encoded))
        np.save(folder / _OFFSETS, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]))
        with (folder / _WORDS).open("wb") as file:
            file.writelines(encoded)
        return [word.decode() for word in encoded]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        """A word by its number, in UTF-8."""
        return self._words[int(self._offsets[number]) : int(self._offsets[number + 1])]

    def number(self, word: str) -> int | None:
        """The number of a word; None where no passage has it."""
        encoded = word.encode()
        place = bisect_left(self, encoded)
        return place if place < len(self) and self[place] == encoded else None

    def close(self) -> None:
        """Let go of the files."""
        self._words.close()
