"""Generated databases as files: built when they are needed, removed when they are many or the folder is closed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

from stepgym_sql.generate.world import World, WorldSpec


class DatabaseFolder:
    """A private temporary folder of generated databases. Safe to use from many threads, and after a fork.

    Args:
        keep: Databases kept; the one that was not used for longest goes first. A database that is asked for again is
            built again, byte for byte the same.
    """

    def __init__(self, *, keep: int = 256) -> None:
        self._keep = keep
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._files: OrderedDict[WorldSpec, Path] = OrderedDict()
        self._path: Path | None = None
        self._remove: Callable[[], object] | None = None

    def path_of(self, spec: WorldSpec) -> Path:
        """The file of a database, built if it is not there."""
        if os.getpid() != self._process:
            self._forget()
        with self._lock:
            if spec in self._files:
                self._files.move_to_end(spec)
                return self._files[spec]
            key = json.dumps(spec.to_dict(), sort_keys=True)
            path = self._folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.sqlite"
            World(spec).write(path)
            self._files[spec] = path
            while len(self._files) > self._keep:
                self._files.popitem(last=False)[1].unlink(missing_ok=True)
            return path

    def close(self) -> None:
        """Remove the folder."""
        if os.getpid() != self._process:
            self._forget()
        with self._lock:
            self._files.clear()
            if self._remove is not None:
                self._remove()
                self._remove = self._path = None

    def _folder(self) -> Path:
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="stepgym-sql-"))
            # Unlike `atexit`, this also runs at the end of a process that multiprocessing started.
            self._remove = Finalize(None, shutil.rmtree, args=(self._path, True), exitpriority=10)
        return self._path

    def _forget(self) -> None:
        # After a fork: the folder is the parent's, and its lock may be held for ever.
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._files = OrderedDict()
        self._path = None
        self._remove = None
