"""What a process holds: threads, child processes, open files. Tells what an environment left behind."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_OUR_THREADS = ("stepgym-worker", "stepgym-loop")
_kept: set[tuple[int, str]] = set()


@dataclass(frozen=True)
class Resources:
    """What this process holds at a moment.

    Attributes:
        threads: Its threads, without those of the library's own pool.
        children: Command lines of its child processes, and of theirs, by process id. Empty where there is no /proc.
        files: What its open file descriptors point to, by number, without what `kept_by_the_process` says. Empty where
            there is no /proc.
    """

    threads: frozenset[threading.Thread]  # not their numbers, which are used again
    children: dict[int, str]
    files: dict[int, str]

    @classmethod
    def now(cls) -> Resources:
        """Look, after a garbage collection (an unreachable file is not a leak that a user can act on)."""
        gc.collect()
        threads = (thread for thread in threading.enumerate() if not thread.name.startswith(_OUR_THREADS))
        return cls(frozenset(threads), _children(os.getpid()), dict(_open_files().items() - _kept))

    def more_than(self, before: Resources) -> list[str]:
        """One line for each thing held now that was not held before."""
        lines = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        lines += [
            f"process {number} ({line})" for number, line in self.children.items() if number not in before.children
        ]
        return [*lines, *(f"open file {target}" for target in _added(self.files, before.files))]


def _added(now: dict[int, str], before: dict[int, str]) -> list[str]:
    """What is pointed to more often than before. A descriptor's number says nothing: numbers are used again."""
    return list((Counter(now.values()) - Counter(before.values())).elements())


def left_behind(before: Resources, patience: float = 2.0) -> list[str]:
    """What is held now beyond `before`, once what is on its way out had `patience` seconds to go."""
    deadline = time.monotonic() + patience
    while True:
        lines = Resources.now().more_than(before)
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.05)


def _children(process: int) -> dict[int, str]:
    parents: dict[int, int] = {}
    for entry in _entries(Path("/proc")):
        if entry.isdecimal():
            try:
                # The command in parentheses may hold spaces and parentheses; the parent comes two fields after it.
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry)] = int(stat[1])
    found: dict[int, str] = {}
    below = [process]
    while below:
        parent = below.pop()
        for child, its_parent in parents.items():
            if its_parent == parent and child not in found:
                found[child] = _command_line(child)
                below.append(child)
    return found


def _command_line(process: int) -> str:
    try:
        return Path("/proc", str(process), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _open_files() -> dict[int, str]:
    files: dict[int, str] = {}
    for entry in _entries(Path("/proc/self/fd")):
        try:
            files[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of this very listing
    return files


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@contextmanager
def kept_by_the_process() -> Iterator[None]:
    """Files that are opened meanwhile are no leak: of a machine that a process starts once and cannot end (Java's).

    Its thread, if it has one, has a name that begins with `stepgym-worker`.
    """
    before = _open_files().items()
    try:
        yield
    finally:
        _kept.update(_open_files().items() - before)


@contextmanager
def private_temporary_folder() -> Iterator[Callable[[], list[str]]]:
    """Let everything that is made in the temporary folder meanwhile go to an empty one of our own.

    Yields a function that lists what lies there. The folder is removed at the end.
    """
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="stepgym-check-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield lambda: sorted(os.listdir(folder))
        finally:
            tempfile.tempdir = before
            if variable is None:
                os.environ.pop("TMPDIR", None)
            else:
                os.environ["TMPDIR"] = variable
