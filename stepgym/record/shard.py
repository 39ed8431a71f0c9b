"""Parquet files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stepgym.errors import UserError

_log = logging.getLogger(__name__)

SUFFIX = ".parquet"
_TEMPORARY = ".writing-"
_ABANDONED_S = 24 * 3600.0
_ATTEMPTS = 3


def list_shards(folder: Path) -> list[Path]:
    """The finished shards of a folder, oldest first. Files that begin with a dot or an underscore are none."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot read the folder of the store: {error.strerror}") from None
    return [folder / name for name in sorted(names) if name.endswith(SUFFIX) and name[0] not in "._"]


def write_shard(folder: Path, table: pa.Table) -> Path:
    """Write a table to a new shard and return its path once it is safe on disk.

    Its name begins with the time in nanoseconds, so that names sort by age, and ends in random digits, so that
    writers in other processes and on other machines do not collide. Raises `UserError` when the disk refuses.
    """
    name = f"{time.time_ns():020d}-{secrets.token_hex(6)}"
    temporary = folder / f"{_TEMPORARY}{_host()}-{os.getpid()}-{name}"
    final = folder / f"{name}{SUFFIX}"
    try:
        for attempt in range(_ATTEMPTS):
            _write_synced(temporary, table)
            try:
                os.rename(temporary, final)
                break
            except FileNotFoundError:
                # Another writer took this one for dead (two containers with one host name) and cleaned up.
                if attempt == _ATTEMPTS - 1:
                    raise
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{folder}: cannot write to the trajectory store: {error.strerror or error}") from None
    return final


def clean_temporaries(folder: Path) -> None:
    """Remove what killed writers left half written. Files of writers that live, or may live elsewhere, stay."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if _abandoned(path):
            with contextlib.suppress(OSError):
                path.unlink()
                _log.info("removed %s, left half written by a writer that was killed", path)


def _write_synced(path: Path, table: pa.Table) -> None:
    with open(path, "wb") as file:
        pq.write_table(table, file, compression="zstd", row_group_size=64, use_dictionary=_text_columns(table.schema))
        file.flush()
        os.fsync(file.fileno())


def _text_columns(schema: pa.Schema) -> list[str]:
    """Parquet paths of the columns that hold text, which repeats. Dictionaries of numbers cost time and size."""
    paths: list[str] = []

    def visit(path: str, kind: pa.DataType) -> None:
        if pa.types.is_string(kind):
            paths.append(path)
        elif pa.types.is_struct(kind):
            for field in kind:
                visit(f"{path}.{field.name}", field.type)
        elif pa.types.is_list(kind):
            visit(f"{path}.list.element", kind.value_type)

    for field in schema:
        visit(field.name, field.type)
    return paths


def _sync_folder(folder: Path) -> None:
    # Without this a power cut may undo the rename, although the file itself is safe.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host() -> str:
    return socket.gethostname().replace("-", "_").replace("/", "_") or "host"


def _abandoned(path: Path) -> bool:
    try:
        host, pid, _, _ = path.name.removeprefix(_TEMPORARY).split("-")
        if host == _host():
            return int(pid) != os.getpid() and not _alive(int(pid))
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except (ValueError, OSError):
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
