from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepgym.errors import UserError
from stepgym.record import shard
from stepgym.record.shard import clean_temporaries, list_shards, write_shard


def test_shards_sort_by_age_and_never_collide(tmp_path):
    written = [write_shard(tmp_path, pa.table({"x": [n]})) for n in range(20)]
    assert list_shards(tmp_path) == written
    assert [pq.read_table(path).column("x")[0].as_py() for path in written] == list(range(20))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}


def test_files_that_readers_ignore(tmp_path):
    for name in (".writing-host-1-0-ab", "_metadata.parquet", ".x.parquet", "notes.txt"):
        (tmp_path / name).write_text("")
    assert list_shards(tmp_path) == []


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_what_killed_writers_left_is_removed(tmp_path):
    host = shard._host()
    dead = tmp_path / f".writing-{host}-{dead_pid()}-0001-ab"
    alive = tmp_path / f".writing-{host}-{os.getppid()}-0001-ab"
    own = tmp_path / f".writing-{host}-{os.getpid()}-0001-ab"
    elsewhere = tmp_path / ".writing-elsewhere-1-0001-ab"
    long_ago = tmp_path / ".writing-elsewhere-1-0001-cd"
    unknown = tmp_path / ".writing-what"
    for path in (dead, alive, own, elsewhere, long_ago, unknown):
        path.write_bytes(b"half a shard")
    os.utime(long_ago, (1, 1))
    clean_temporaries(tmp_path)
    assert set(tmp_path.iterdir()) == {alive, own, elsewhere, unknown}


def test_a_folder_that_is_gone_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot write to the trajectory store"):
        write_shard(tmp_path / "gone", pa.table({"x": [1]}))
    with pytest.raises(UserError, match="cannot read the folder"):
        list_shards(tmp_path / "gone")
