from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from stepgym_sql.dataset import load_rows
from stepgym_sql.env import SQLEnv

from stepgym.errors import EnvError, UnscorableTask, UserError

GOLD = "SELECT name FROM product WHERE kind = 'toy'"


def row(**changes: Any) -> dict[str, Any]:
    made = {
        "prompt": [
            {"role": "system", "content": "You are an expert."},
            {"role": "user", "content": "Which toys are there?"},
        ],
        "db_id": "shop",
        "data": "spider",
        "reward_spec": {"method": "rule", "ground_truth": GOLD},
        "extra_info": {"index": 3},
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def root(make_database: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    make_database(path=root / "spider/database/shop/shop.sqlite")
    make_database(path=root / "SynSQL-2.5M/databases/shop/shop.sqlite")
    make_database(path=root / "bird/train/train_databases/shop/shop.sqlite")
    make_database(path=root / "mine/shop/shop.sqlite")
    noise = root / "spider/database/noise/noise.sqlite"
    noise.parent.mkdir(parents=True)
    noise.write_text("this is no database, but long enough to have a header")
    return root


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_rows_are_read_from_every_kind_of_file(tmp_path: Path, root: Path, suffix: str) -> None:
    rows = [row(data=data) for data in ("synsql", "spider", "bird", "mine")]
    tasks = load_rows(str(write(tmp_path / f"train{suffix}", rows)), "train", str(root))
    assert [task.id for task in tasks] == ["synsql/shop/0", "spider/shop/1", "bird/shop/2", "mine/shop/3"]
    assert tasks[0].prompt == "Which toys are there?"
    assert tasks[0].answer == GOLD
    assert tasks[0].data["messages"] == rows[0]["prompt"]
    assert [task.data["database"] for task in tasks] == [
        "SynSQL-2.5M/databases/shop/shop.sqlite",
        "spider/database/shop/shop.sqlite",
        "bird/train/train_databases/shop/shop.sqlite",
        "mine/shop/shop.sqlite",
    ]
    json.dumps([task.to_dict() for task in tasks])


def test_a_folder_holds_one_or_more_files_for_each_split(tmp_path: Path, root: Path) -> None:
    write(tmp_path / "train-0.parquet", [row()])
    write(tmp_path / "train-1.parquet", [row(), row()])
    write(tmp_path / "validation.jsonl", [row()])
    assert len(load_rows(str(tmp_path), "train", str(root))) == 3
    assert len(load_rows(str(tmp_path), "validation", str(root))) == 1
    assert len(load_rows(f"{tmp_path}#validation", "test", str(root))) == 1
    with pytest.raises(UserError, match=r"has no file test\*.parquet"):
        load_rows(str(tmp_path), "test", str(root))


def test_text_where_a_structure_is_usual_is_understood(tmp_path: Path, root: Path) -> None:
    spec = json.dumps({"ground_truth": GOLD})
    (task,) = load_rows(str(write(tmp_path / "a.json", [row(prompt="Toys?", reward_spec=spec)])), "train", str(root))
    assert task.data["messages"] == [{"role": "user", "content": "Toys?"}]
    assert task.answer == GOLD


def without(field: str) -> dict[str, Any]:
    made = row()
    del made[field]
    return made


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (without("prompt"), "row 1: no field 'prompt'; it has data, db_id"),
        (without("db_id"), "row 1: no field 'db_id'"),
        (without("data"), "row 1: no field 'data'"),
        (without("reward_spec"), "row 1: no field 'reward_spec'"),
        (row(reward_spec={"method": "rule"}), "row 1, field 'reward_spec': no field 'ground_truth'"),
        (row(reward_spec={"ground_truth": " "}), "field 'ground_truth': expected text"),
        (row(prompt=[]), "field 'prompt': no message has the role 'user'"),
        (row(prompt=[{"role": "user"}]), "field 'prompt': expected a list of messages"),
        (row(prompt=7), "field 'prompt': expected a list of messages"),
        (row(db_id=7), "field 'db_id': expected text, not 7"),
        (row(db_id="../shop"), "field 'db_id': '../shop' is not the name of a folder"),
        (row(data=".."), "field 'data': '..' is not the name of a folder"),
        (row(db_id="nothing"), "row 1, field 'db_id': there is no database"),
        (row(db_id="noise"), "noise.sqlite is not an SQLite database"),
        ("text", "row 1: a row is a mapping, not str"),
    ],
)
def test_a_bad_row_is_named_with_its_field(tmp_path: Path, root: Path, bad: Any, message: str) -> None:
    path = write(tmp_path / "train.json", [row(), bad])
    with pytest.raises(UserError) as raised:
        load_rows(str(path), "train", str(root))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.parquet", None, "there is no data set"),
        ("no such folder/at all/x", None, "there is no data set"),
        ("torn.parquet", b"PAR1 torn", "torn.parquet cannot be read"),
        ("torn.json", b'[{"prompt": ', "torn.json cannot be read"),
        ("latin.json", b'["\xff"]', "latin.json cannot be read"),
        ("one.json", b'{"prompt": "x"}', "must hold a list of rows, not dict"),
        ("rows.csv", b"a,b", "rows.csv: a data set is a .parquet, .json, .jsonl file, not .csv"),
        ("empty.json", b"[]", "has no rows"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, root: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_rows(str(path), "train", str(root))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs `database_root`"):
        load_rows("x.json", "train", None)
    with pytest.raises(UserError, match="is not a folder"):
        load_rows("x.json", "train", str(tmp_path / "nowhere"))


def test_the_hub_is_asked_through_datasets(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="stepgym-nobody/no-such-rows, split 'train', cannot be loaded from the hub"):
        load_rows("stepgym-nobody/no-such-rows", "train", str(root))


def test_an_episode_over_real_rows(tmp_path: Path, root: Path) -> None:
    empty = row(reward_spec={"ground_truth": "SELECT name FROM product WHERE kind = 'none'"})
    failing = row(reward_spec={"ground_truth": "SELECT colour FROM product"})
    path = write(tmp_path / "train.parquet", [row(), empty, failing])
    env = SQLEnv(dataset=str(path), database_root=str(root), workers=1)
    tasks = env.tasks("train")
    assert env.splits == ("train",)
    with pytest.raises(UserError, match="there is no split 'test'; known: train"):
        env.tasks("test")
    messages, _ = env.reset(seed=0, options={"task": tasks[0]})
    assert messages == row()["prompt"]
    info: dict[str, Any] = {}
    for turn in env.expert(tasks[0]):
        *_, info = env.step(turn)
    assert info["success"]
    with pytest.raises(UnscorableTask, match="spider/shop/1: the gold query gives no rows"):
        env.reset(options={"task": tasks[1]})
    with pytest.raises(EnvError, match="spider/shop/2: the gold query fails: no such column: colour"):
        env.reset(options={"task": tasks[2]})
    by_call = SQLEnv(dataset=str(path), database_root=str(root), workers=1, actions="tools")
    messages, _ = by_call.reset(options={"task": tasks[0]})
    assert messages[0] == row()["prompt"][0]
    assert "calling tools instead" in messages[1]["content"]
    assert tasks[0].data["messages"] == row()["prompt"]
