from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from stepgym.env.rows import Row, read_rows
from stepgym.errors import UserError

ROWS = [{"question": "a\u2028b", "answers": ["x", "é"]}, {"question": "c", "answers": []}]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert list(read_rows(str(path), "train", where="x")) == [Row(str(path), n, row) for n, row in enumerate(ROWS)]


def test_a_folder_holds_one_or_more_files_for_each_split(tmp_path: Path) -> None:
    first, second = write(tmp_path / "train-0.parquet", ROWS), write(tmp_path / "train-1.jsonl", ROWS[:1])
    write(tmp_path / "dev.json", ROWS[1:])
    (tmp_path / "train.txt").write_text("notes")
    places = [(row.place, row.number) for row in read_rows(str(tmp_path), "train", where="x")]
    assert places == [(str(first), 0), (str(first), 1), (str(second), 0)]
    assert [row.row for row in read_rows(f"{tmp_path}#dev", "validation", where="x")] == ROWS[1:]
    with pytest.raises(UserError, match=r"^x: .* has no file test\*.parquet"):
        list(read_rows(str(tmp_path), "test", where="x"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.parquet", None, "there is no data set"),
        ("no such folder/at all", None, "there is no data set"),
        ("torn.parquet", b"PAR1 torn", "torn.parquet cannot be read"),
        ("torn.json", b'[{"prompt": ', "torn.json cannot be read"),
        ("torn.jsonl", b'{"a": 1}\n\n{"a": \n', "torn.jsonl, line 3 cannot be read"),
        ("latin.jsonl", b'"\xff"', "latin.jsonl cannot be read"),
        ("one.json", b'{"prompt": "x"}', "must hold a list of rows, not dict"),
        ("rows.csv", b"a,b", "a data set is a .parquet, .json, .jsonl file, not .csv"),
        ("rows", b"a,b", "not one without suffix"),
        ("empty.json", b"[]", "has no rows"),
        ("empty.jsonl", b"\n", "has no rows"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        list(read_rows(str(path), "train", where="x"))
    assert str(raised.value).startswith("x: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("stepgym-nobody/no-such-rows", "stepgym-nobody/no-such-rows, split 'train'"),
        ("stepgym-nobody/no-such-rows:nq#dev", "stepgym-nobody/no-such-rows:nq, split 'dev'"),
    ],
)
def test_the_hub_is_asked_through_datasets(monkeypatch: pytest.MonkeyPatch, source: str, shown: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"x: {shown}, cannot be loaded from the hub"):
        list(read_rows(source, "train", where="x"))
