"""A corpus of passages: a file of JSON lines, `{"id", "contents"}`, read where it lies."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from stepgym.errors import EnvError, UserError
from stepgym.home import home
from stepgym_search.built_folder import build_once
from stepgym_search.document import Document
from stepgym_search.progress import LongWork
from stepgym_search.text import well_formed

LONGEST_LINE = 64 * 2**20
"""Bytes. A longer line is taken for a file that is no JSON lines (one great JSON array, say)."""

_TOLD_LINES = 4096
_VERSION = 1
_OFFSETS = "offsets.npy"
_DESCRIPTION = "corpus.json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Corpus(Sequence[Document]):
    """The passages of a file of JSON lines, in its order. Row i is line i; empty lines do not count.

    A line is an object with `contents`, a text whose first line is the title, and `id`, a text or a whole number (where
    it is missing, the row's number); that no two are the same is not checked. Other keys are left alone. Nothing of the
    file is held in memory: a passage is read when it is asked for. The first opening reads the file once, checks every
    line, and keeps what it found (where each row begins, the digest) under `stepgym.home`; later openings take that, as
    long as path, size and time of change are the same. Safe to use from many threads and after a fork.

    Args:
        path: The file.

    Attributes:
        path: The file, absolute.
        digest: sha256 of the file's bytes, in hexadecimal.

    Raises:
        UserError: The file is missing, compressed or empty, or a line of it is no such object.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._file = _open(self.path)
        try:
            state = os.fstat(self._file)
            self._state = (state.st_size, state.st_mtime_ns)
            self._offsets, self.digest = self._scanned()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Document: ...
    @overload
    def __getitem__(self, row: slice) -> list[Document]: ...
    def __getitem__(self, row: int | slice) -> Document | list[Document]:
        """The passage of a row, or the list of those of a slice.

        Raises:
            IndexError: There is no such row.
            EnvError: The file is not what it was when the corpus was opened, or the corpus is closed.
        """
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        position = row + len(self) if row < 0 else row
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path} has {len(self)} passages, none at row {row}")
        start, end = int(self._offsets[position]), int(self._offsets[position + 1])
        try:
            state = os.fstat(self._file)
            unchanged = (state.st_size, state.st_mtime_ns) == self._state
            line = os.pread(self._file, end - start, start) if unchanged else b""
        except OSError as error:
            raise EnvError(f"corpus: cannot read {self.path}: {error.strerror}") from None
        if not unchanged:
            raise EnvError(f"corpus: {self.path} was changed while it was open; start again")
        try:
            return _document(line, position)
        except ValueError as error:
            raise EnvError(f"corpus: row {row} of {self.path} cannot be read: {error}; start again") from None

    def __iter__(self) -> Iterator[Document]:
        """The passages in order."""
        return (self[row] for row in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r})"

    def close(self) -> None:
        """Close the file; no passage can be read any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()

    def _scanned(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], str]:
        size, changed = self._state
        key = json.dumps([_VERSION, str(self.path), size, changed])
        folder = home("search", "corpora", hashlib.sha256(key.encode()).hexdigest()[:24])
        found = _kept(folder, size)
        if found is None:
            build_once(folder, self._scan, is_built=lambda folder: _kept(folder, size) is not None)
            found = _kept(folder, size)
        if found is None:
            raise UserError(f"{folder} cannot be read back after it was written; remove it and start again")
        return found

    def _scan(self, folder: Path) -> None:
        """Read the whole file once; write down where rows begin, and the digest."""
        size = self._state[0]
        progress = LongWork(f"reading {self.path} for the first time", size / 1e9, "GB")
        digest = hashlib.sha256()
        starts = array("q")
        position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                digest.update(line)
                mark = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
                if line[mark:].strip():
                    self._check(line[mark:], number)
                    starts.append(position + mark)
                position += len(line)
                if number % _TOLD_LINES == 0:
                    progress.at(position / 1e9)
            state = os.fstat(file.fileno())
        if position != size or (state.st_size, state.st_mtime_ns) != self._state:
            raise UserError(f"{self.path} was changed while it was read; start again when it is whole")
        if not starts:
            raise UserError(f"{self.path} holds no passage: a corpus has one JSON object per line")
        rows = len(starts)
        starts.append(size)
        offsets = np.asarray(starts, dtype=np.int64)
        np.save(folder / _OFFSETS, offsets)
        description = {
            "version": _VERSION,
            "path": str(self.path),
            "digest": digest.hexdigest(),
            "rows": rows,
            "checksum": zlib.crc32(offsets.data),
        }
        (folder / _DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    def _check(self, line: bytes, number: int) -> None:
        if len(line) > LONGEST_LINE:
            raise UserError(
                f"line {number} of {self.path} is longer than {LONGEST_LINE // 2**20} MiB: "
                'a corpus has one JSON object per line, {"id": ..., "contents": ...}'
            )
        try:
            _document(line, 0)
        except ValueError as error:
            raise UserError(f"line {number} of {self.path}: {error}") from None


def open_corpus(path: str | Path) -> Corpus:
    """Open a corpus; see `Corpus`.

    Raises:
        UserError: The file is missing, compressed or empty, or a line of it is no object with a text `contents`.
    """
    return Corpus(path)


def _open(path: Path) -> int:
    if path.suffix in {".gz", ".bz2", ".xz", ".zst", ".zip"}:
        raise UserError(f"{path} is compressed: unpack it first, passages are read where they lie")
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that nobody writes to would wait
    except FileNotFoundError:
        raise UserError(f"there is no corpus at {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the corpus {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{str(path)!r} is no path of a corpus: {error}") from None
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        kind = "a folder" if stat.S_ISDIR(mode) else "no file that can be read twice, but a pipe or a device"
        raise UserError(f"{path} is {kind}: a corpus is one file of JSON lines")
    return file


def _kept(folder: Path, size: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], str] | None:
    """The row offsets and the digest that an earlier opening kept; None where there are none, or damaged ones."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_bytes())
        offsets = np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False)
        whole = (
            description["version"] == _VERSION
            and offsets.dtype == np.int64
            and offsets.shape == (description["rows"] + 1,)
            and int(offsets[-1]) == size
            and zlib.crc32(np.asarray(offsets).data) == description["checksum"]
        )
        digest = description["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (offsets, digest) if whole and isinstance(digest, str) else None


def _document(line: bytes, row: int) -> Document:
    """The passage of a line; ValueError says what is wrong with it."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: too deeply nested") from None
    contents = fields.get("contents") if isinstance(fields, dict) else None
    if not isinstance(contents, str):
        raise ValueError('not a JSON object with a text "contents", as in {"id": "7", "contents": "Title\\nText"}')
    name = fields.get("id", row)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError(f'"id" is {json.dumps(name)[:40]}, not a text or a whole number')
    return Document(id=well_formed(str(name)), contents=well_formed(contents))
