"""Weights & Biases, offline: the real client writes, and what it wrote is read back."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="needs the package wandb: pip install 'stepgym[wandb]'")


def records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: a LevelDB log of 32 KiB blocks behind a header of 7 bytes."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""
        if 32768 - place % 32768 < 7:  # no header fits: the block is padded
            place += 32768 - place % 32768


def read(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of an offline run, and whether its end is written."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, ended = [], False
    for data in records(file):
        record = Record.FromString(data)
        ended = ended or record.HasField("exit")
        if record.HasField("history"):
            items = record.history.item
            rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows, ended


def history(folder: Path) -> list[dict[str, Any]]:
    """All rows of the offline runs under a folder. The process that writes them goes on for a moment after the run."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    deadline = time.monotonic() + 30
    while not all(read(file)[1] for file in files):
        assert time.monotonic() < deadline, "wandb did not write the end of a run"
        time.sleep(0.05)
    return sorted((row for file in files for row in read(file)[0]), key=lambda row: row["_timestamp"])


def test_offline_runs_of_one_id_hold_every_iteration_once(
    tmp_path: Path,
    logged: Callable[..., Any],
    make_row: Callable[..., dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    path, config = tmp_path / "run", {"sinks": [{"kind": "wandb", "mode": "offline", "tags": ["test"]}]}
    with logged(path, config, recipe={"seed": 3}) as (log, notes):
        for number in range(1, 4):
            log.iteration(number, make_row(number, truncated_rate=0.9))
        log.close(None)
    assert notes.notes[0].startswith(f"wandb: wandb sync {path}/wandb/offline-run-")
    with logged(path, config, 2) as (log, more):
        for number in range(3, 6):
            log.iteration(number, make_row(number))
        log.close({"success_after": 0.9})
    assert not [note for note in (*notes.notes, *more.notes) if note.startswith("sink")]
    rows = history(path)
    assert [(row["_step"], row["reward_mean"]) for row in rows] == [
        (number, pytest.approx(number / 10)) for number in range(1, 6)
    ]
    assert rows[1]["alarm/responses_cut_off"] == 1
    files = [file.name for file in path.glob("wandb/offline-run-*/*.wandb")]
    assert files == [f"run-{json.loads((path / 'sinks' / 'wandb.json').read_text())['id']}.wandb"] * 2
    assert capfd.readouterr().out == ""
