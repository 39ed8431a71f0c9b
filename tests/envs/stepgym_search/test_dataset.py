from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from stepgym_search import dataset
from stepgym_search.dataset import load_rows

from stepgym.errors import UserError

PROMPT = [{"role": "user", "content": "Answer the given question. Question: who was Velor?\n"}]


def search_r1(**changes: Any) -> dict[str, Any]:
    """A row as `PeterJinGo/nq_hotpotqa_train` has them."""
    row = {
        "id": "train_0",
        "question": "who was Velor",
        "golden_answers": ["a poet"],
        "data_source": "nq",
        "prompt": PROMPT,
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["poet", "writer"]}},
        "extra_info": {"split": "train", "index": 0},
    }
    return {**row, **changes}


def without(row: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in fields}


def load(tmp_path: Path, *rows: Any) -> list[Any]:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(rows))
    return load_rows(str(path), "train")


def test_rows_of_search_r1(tmp_path: Path) -> None:
    first, second = load(tmp_path, search_r1(), search_r1(data_source="hotpotqa"))
    assert first.id == "nq/0"
    assert second.id == "hotpotqa/1"
    assert first.prompt == "who was Velor?"
    assert first.answer == ["poet", "writer"]
    assert first.data == {"data_source": "nq", "messages": PROMPT}
    json.dumps(first.to_dict())


def test_rows_of_flashrag(tmp_path: Path) -> None:
    row = {"id": "test_0", "question": " is Narn a city? ", "golden_answers": ["yes"], "metadata": {}}
    (task,) = load(tmp_path, row)
    assert (task.id, task.prompt, task.answer) == ("train/0", "is Narn a city?", ["yes"])
    assert task.data == {"data_source": "train"}  # named after the file


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        (search_r1(reward_model={"ground_truth": {"target": "poet"}}), ["poet"]),
        (search_r1(reward_model={"ground_truth": ["poet"]}), ["poet"]),
        (search_r1(reward_model={"ground_truth": "poet"}), ["poet"]),
        (search_r1(reward_model=json.dumps({"ground_truth": {"target": ["poet"]}})), ["poet"]),
        (search_r1(reward_model={"ground_truth": {"target": [1945, 2.5]}}), ["1945", "2.5"]),
        (search_r1(reward_model=None), ["a poet"]),
        (without(search_r1(), "reward_model"), ["a poet"]),
        (without(search_r1(reward_spec={"ground_truth": {"target": ["poet"]}}), "reward_model"), ["poet"]),
        (search_r1(reward_model={"ground_truth": {"target": []}}), []),
    ],
)
def test_golden_answers_in_all_their_places(tmp_path: Path, row: dict[str, Any], answers: list[str]) -> None:
    assert load(tmp_path, row)[0].answer == answers


def test_a_prompt_alone_is_the_question(tmp_path: Path) -> None:
    alone, text = load(tmp_path, without(search_r1(), "question"), without(search_r1(prompt="who?"), "question"))
    assert alone.prompt == PROMPT[0]["content"]
    assert text.prompt == "who?"
    assert text.data["messages"] == [{"role": "user", "content": "who?"}]


def test_arrays_are_lists(tmp_path: Path) -> None:
    """As rows look that went through pandas."""
    rows = [search_r1(reward_model={"ground_truth": {"target": np.array(["poet", "é"])}}, prompt=np.array(PROMPT))]
    assert dataset._task(rows[0], "x.parquet", 0, 0).answer == ["poet", "é"]
    assert dataset._task(rows[0], "x.parquet", 0, 0).data["messages"] == PROMPT
    path = tmp_path / "train.parquet"
    pd.DataFrame(rows).to_parquet(path)
    (task,) = load_rows(str(path), "train")
    assert task.answer == ["poet", "é"]
    assert task.data["messages"] == PROMPT
    json.dumps(task.to_dict())


def test_ids_are_unique_across_files(tmp_path: Path) -> None:
    for number in range(2):
        pa.parquet.write_table(pa.Table.from_pylist([search_r1(), search_r1()]), tmp_path / f"train-{number}.parquet")
    assert [task.id for task in load_rows(str(tmp_path), "train")] == ["nq/0", "nq/1", "nq/2", "nq/3"]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/data/nq.parquet", "nq"),
        ("RUC-NLPIR/FlashRAG_datasets:nq[test]", "nq"),
        ("PeterJinGo/nq_hotpotqa_train[train]", "nq_hotpotqa_train"),
    ],
)
def test_a_row_that_names_no_benchmark_is_named_after_its_place(place: str, name: str) -> None:
    row = without(search_r1(), "data_source")
    assert dataset._task(row, place, 3, 5).id == f"{name}/5"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            without(search_r1(), "question", "prompt"),
            "row 1: no field 'question' or 'prompt'; it has ability, data_source",
        ),
        (without(search_r1(question=" "), "prompt"), "row 1: no field 'question' or 'prompt'"),
        (without(search_r1(), "reward_model", "golden_answers"), "row 1: no golden answers in"),
        (search_r1(reward_model={"ground_truth": {}}), "row 1: no golden answers in"),
        (
            search_r1(reward_model={"ground_truth": {"target": [["a"]]}}),
            "'reward_model.ground_truth.target': expected text",
        ),
        (search_r1(reward_model={"ground_truth": {"target": True}}), "expected text or a list of texts, not True"),
        (without(search_r1(golden_answers={"a": 1}), "reward_model"), "field 'golden_answers': expected text"),
        (search_r1(prompt=[{"role": "user"}]), "field 'prompt': expected a list of messages"),
        (search_r1(prompt=7), "field 'prompt': expected a list of messages"),
        (search_r1(prompt=[{"role": "system", "content": "x"}]), "field 'prompt': no message has the role 'user'"),
        ("text", "row 1: a row is a mapping, not str"),
    ],
)
def test_a_bad_row_is_named_with_its_field(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load(tmp_path, search_r1(), bad)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"search: {tmp_path / 'train.json'}, row 1")
    assert "\n" not in str(raised.value)
