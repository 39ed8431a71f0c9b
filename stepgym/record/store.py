"""Where trajectories are kept: a folder of Parquet shards, one row per trajectory.

A shard is written whole or not at all: under a temporary name that readers ignore, synced to disk, then renamed.
So a killed writer loses what it had not flushed and nothing else, a reader may look while writers write, and several
writers may share a folder. The shards are plain Parquet: `datasets.load_dataset("parquet", data_files="DIR/*.parquet")`
reads them, and nothing in them is ever unpickled.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from stepgym.errors import UserError
from stepgym.record.json_text import dump_text, load_text
from stepgym.record.schema import SCHEMA, VERSION, VERSION_KEY, Row, from_table, rows_to_table, to_row
from stepgym.record.shard import clean_temporaries, list_shards, write_shard
from stepgym.record.trajectory import Trajectory, TrajectoryId

_log = logging.getLogger(__name__)

_FLUSH_BYTES = 64_000_000
"""A shard is written early when this much waits, so that memory stays bounded."""

_ID_COLUMNS = ["phase", "iteration", "task_id", "sample", "attempt", "final"]


class _Place(NamedTuple):
    """Where a trajectory lies."""

    shard: Path
    row: int
    final: bool


class TrajectoryStore:
    """A folder of trajectories, to read (`mode="r"`) or to append to and read (`mode="a"`).

    A store open for reading sees what writers have flushed by the time of each call. Iterating, `len` and `ids` cover
    every attempt that was stored, also those that failed and were tried again; `final_only` leaves these out.

    Args:
        path: The folder. `mode="a"` makes it where it is missing.
        mode: `r` or `a`.
        flush_every: In mode `a`, a shard is written as soon as this many trajectories wait.
        flush_seconds: In mode `a`, a shard is written when the oldest waiting trajectory is this old, so that a live
            reader sees progress. Neither limit makes `flush` needless: what waits is lost when the process is killed.

    Raises:
        UserError: for a folder that does not exist (mode `r`), a path that is not a folder, a shard that cannot be
            read, which is named, and a shard of another version of the format.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["r", "a"] = "r",
        *,
        flush_every: int = 64,
        flush_seconds: float = 10.0,
    ) -> None:
        if mode not in ("r", "a"):
            raise UserError(f"TrajectoryStore: mode must be 'r' or 'a', not {mode!r}")
        if flush_every < 1 or not flush_seconds > 0:
            raise UserError("TrajectoryStore: flush_every must be at least 1 and flush_seconds more than 0")
        self.path = Path(path)
        self.mode = mode
        self.flush_every = flush_every
        self.flush_seconds = flush_seconds
        self._lock = threading.RLock()
        self._known: dict[TrajectoryId, _Place] = {}
        self._shards: dict[Path, None] = {}
        self._waiting: dict[TrajectoryId, Row] = {}
        self._waiting_bytes = 0
        self._unreported: list[TrajectoryId] = []
        self._last: tuple[Path, pa.Table] | None = None  # the shard read last: ids are mostly loaded in order
        self._timer: threading.Timer | None = None
        self._timer_error: Exception | None = None
        self._closed = False
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path}: a trajectory store is a folder, this is a file")
        if mode == "a":
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{self.path}: cannot make the folder of the store: {error.strerror}") from None
            clean_temporaries(self.path)
        elif not self.path.exists():
            raise UserError(f"{self.path}: no such trajectory store")
        self._refresh()

    # ---- writing ----------------------------------------------------------------------------------------------

    def append(self, trajectory: Trajectory) -> None:
        """Add a trajectory. It is safe on disk once `flush` has returned its id.

        Raises `UserError` when the store already has this id, was opened for reading or is closed, or when the
        trajectory holds what its column cannot.
        """
        with self._lock:
            self._check_writable()
            if trajectory.id in self._waiting or trajectory.id in self._known:
                raise UserError(f"{self.path}: the trajectory {_name(trajectory.id)} is already in the store")
            try:
                row = to_row(trajectory)
            except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as error:
                raise UserError(f"{self.path}: cannot store {_name(trajectory.id)}: {_line(error)}") from error
            self._waiting[trajectory.id] = row
            self._waiting_bytes += row.nbytes
            if len(self._waiting) >= self.flush_every or self._waiting_bytes >= _FLUSH_BYTES:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(self.flush_seconds, self._write_because_old)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> list[TrajectoryId]:
        """Write what waits to disk. Returns the ids that became durable since the last call, also by themselves.

        Raises `UserError` when the disk refuses (full, read-only); nothing is lost then, and the next call tries again.
        """
        with self._lock:
            self._check_writable()
            self._write()
            reported, self._unreported = self._unreported, []
            return reported

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            if self.mode == "a":
                self._write()
            self._closed = True

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self.mode != "a":
            raise UserError(f"{self.path}: the store was opened for reading; open it with mode='a' to append")
        if self._closed:
            raise UserError(f"{self.path}: the store is closed")
        if self._timer_error is not None:
            error, self._timer_error = self._timer_error, None
            raise error

    def _write_because_old(self) -> None:
        with self._lock:
            self._timer = None
            try:
                self._write()
            except Exception as error:  # nobody waits on this thread: the next call of append or flush raises it
                self._timer_error = error

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._refresh()
        for key in [key for key in self._waiting if key in self._known]:
            _log.warning("%s: another writer has stored %s; this copy is dropped", self.path, _name(key))
            del self._waiting[key]
        if not self._waiting:
            return
        table = rows_to_table(list(self._waiting.values()))
        shard = write_shard(self.path, table)
        self._shards[shard] = None
        for row, (key, final) in enumerate(zip(self._waiting, table.column("final").to_pylist(), strict=True)):
            self._known[key] = _Place(shard, row, final)
            self._unreported.append(key)
        self._waiting.clear()
        self._waiting_bytes = 0

    # ---- reading ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.ids())

    def __contains__(self, trajectory_id: object) -> bool:
        with self._lock:
            if trajectory_id not in self._waiting and trajectory_id not in self._known:
                self._refresh()
            return trajectory_id in self._waiting or trajectory_id in self._known

    def __iter__(self) -> Iterator[Trajectory]:
        return self.read()

    def ids(self, *, final_only: bool = False) -> list[TrajectoryId]:
        """Ids of all trajectories, in the order they were written; those that wait to be written come last."""
        with self._lock:
            self._refresh()
            keys = [key for key, place in self._known.items() if place.final or not final_only]
            for key, row in self._waiting.items():
                if key not in self._known and (row.cells["final"] or not final_only):
                    keys.append(key)
            return keys

    def load(self, trajectory_id: TrajectoryId | str) -> Trajectory:
        """One trajectory by its id, or by the text of it. Raises `UserError` where the store has none by this id."""
        try:
            key = TrajectoryId.parse(trajectory_id) if isinstance(trajectory_id, str) else trajectory_id
        except ValueError:
            example = TrajectoryId("train", 0, "TASK", 3)
            raise UserError(f"{trajectory_id!r} is no id of a trajectory; ids look like {example}") from None
        if key not in self:
            raise UserError(f"{self.path}: no trajectory {_name(key)} in the store")
        with self._lock:
            if key in self._waiting:
                return from_table(rows_to_table([self._waiting[key]]))[0]
            place = self._known[key]
            with _naming(place.shard):
                if self._last is None or self._last[0] != place.shard:
                    self._last = (place.shard, pq.read_table(place.shard, partitioning=None))
                return from_table(self._last[1].slice(place.row, 1))[0]

    def read(
        self,
        *,
        final_only: bool = False,
        where: pads.Expression | None = None,
        with_steps: bool = True,
        **equals: Any,
    ) -> Iterator[Trajectory]:
        """The trajectories that match, shard by shard in the order they were written, so memory stays bounded.

        Args:
            final_only: Leave out attempts that failed and were tried again.
            where: A `pyarrow.dataset` expression over the columns, as in `field("reward") > 0.5`.
            with_steps: False reads everything but the steps, which is much faster.
            equals: Columns by name, each with the value it must have or a list of such values:
                `phase="train", iteration=3`, `outcome=["completed", "turn_limit"]`.

        A store open for writing writes what waits first. Raises `UserError` for an unknown column, and for a value
        that is not of the column's type.
        """
        condition = _condition(final_only, where, equals)
        columns = SCHEMA.names if with_steps else [name for name in SCHEMA.names if name != "steps"]
        return self._read(self._flushed_shards(), columns, condition)

    def _read(
        self, shards: Sequence[Path], columns: list[str], condition: pads.Expression | None
    ) -> Iterator[Trajectory]:
        for shard in shards:
            with _naming(shard):
                trajectories = from_table(_dataset([shard]).to_table(columns=columns, filter=condition))
            for trajectory in trajectories:
                if self._known[trajectory.id].shard == shard:  # else a copy that came later
                    yield trajectory

    def table(
        self,
        columns: Sequence[str] | None = None,
        *,
        final_only: bool = False,
        where: pads.Expression | None = None,
        **equals: Any,
    ) -> pa.Table:
        """The columns asked for (all but `steps` where none are named) of the rows that match, as a `pyarrow.Table`.

        Reads nothing else from disk. Filters as of `read`; values are as they are stored (free-form ones as JSON).
        """
        names = list(columns) if columns is not None else [name for name in SCHEMA.names if name != "steps"]
        for name in names:
            _check_column(name)
        condition = _condition(final_only, where, equals)
        shards = self._flushed_shards()
        if not shards:
            return SCHEMA.remove_metadata().empty_table().select(names)
        try:
            return _dataset(shards).to_table(columns=names, filter=condition)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.path}: cannot read the store: {_line(error)}") from None

    def _flushed_shards(self) -> list[Path]:
        with self._lock:
            if self.mode == "a" and not self._closed:
                self._write()
            self._refresh()
            return list(self._shards)

    def _refresh(self) -> None:
        """Take in the shards that other writers have finished since."""
        for shard in list_shards(self.path):
            if shard in self._shards:
                continue
            with _naming(shard):
                file = pq.ParquetFile(shard)
                version = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
                if version != VERSION.encode():
                    found = "none" if version is None else version.decode(errors="replace")
                    raise UserError(f"{shard}: not a trajectory shard of version {VERSION} (its version: {found})")
                rows = file.read(columns=_ID_COLUMNS).to_pylist()
            self._shards[shard] = None
            for row, values in enumerate(rows):
                key = TrajectoryId(
                    load_text(values["phase"]),
                    values["iteration"],
                    load_text(values["task_id"]),
                    values["sample"],
                    values["attempt"],
                )
                if key in self._known:
                    _log.warning("%s: %s is in the store already; this copy is ignored", shard, _name(key))
                else:
                    self._known[key] = _Place(shard, row, values["final"])


@contextmanager
def _naming(shard: Path) -> Iterator[None]:
    """Turns what goes wrong inside into a `UserError` that names the shard."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shard}: cannot read this trajectory shard: {_line(error)}") from error


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _name(key: TrajectoryId) -> str:
    return dump_text(str(key))


def _check_column(name: str) -> None:
    if name not in SCHEMA.names:
        raise UserError(f"a trajectory store has no column {name!r}; columns: {', '.join(SCHEMA.names)}")


def _condition(final_only: bool, where: pads.Expression | None, equals: dict[str, Any]) -> pads.Expression | None:
    parts = [] if where is None else [where]
    if final_only:
        parts.append(pads.field("final"))
    for name, value in equals.items():
        _check_column(name)
        many = isinstance(value, Collection) and not isinstance(value, str)
        values = [dump_text(str(v)) if isinstance(v, str) else v for v in (value if many else [value])]
        try:
            wanted = pa.array([v for v in values if v is not None], SCHEMA.field(name).type)
        except (pa.ArrowException, TypeError, ValueError):
            raise UserError(f"{name}={value!r}: the column holds {SCHEMA.field(name).type}") from None
        part = pads.field(name).isin(wanted)
        if any(v is None for v in values):
            part = part | pads.field(name).is_null()
        parts.append(part)
    condition = None
    for part in parts:
        condition = part if condition is None else condition & part
    try:
        pads.dataset(SCHEMA.empty_table()).to_table(columns=["id"], filter=condition)
    except (pa.ArrowException, TypeError) as error:
        raise UserError(f"the filter {where} does not fit the store: {_line(error)}") from None
    return condition


def _dataset(shards: Sequence[Path]) -> pads.Dataset:
    return pads.dataset([str(shard) for shard in shards], schema=SCHEMA.remove_metadata(), format="parquet")
