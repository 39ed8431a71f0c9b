"""Promise 16: "Every trajectory store can be read by `datasets.load_dataset("parquet", ...)`; nothing of it is ever
unpickled."
"""

from __future__ import annotations

import json
import subprocess
import sys

import datasets
import numpy as np

from stepgym.record.outcome import Outcome
from stepgym.record.schema import SCHEMA, STEP_TYPE
from stepgym.record.step import Sampling, Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId


def write_store(folder):
    full = Step(
        prompt_ids=[1, 2],
        response_ids=[3],
        logprobs=[-0.5],
        reward=1.0,
        message={"role": "assistant", "content": "\ud800 \x00 中", "n": 10**30, "x": float("nan")},
        new_messages=[{"role": "user", "content": "hi"}],
        sampling=Sampling(),
        weights_versions=[("1", 0, 1)],
        routed_experts=np.zeros((3, 2, 2)),
        metrics={"wall_s": 0.5},
    )
    silent = Step(prompt_ids=[1, 2, 3, 4], response_ids=[], logprobs=[])
    chat_only = Step(prompt_ids=None, response_ids=None)
    with TrajectoryStore(folder, "a", flush_every=1) as store:
        for sample, steps in enumerate([[full, silent], [chat_only], []]):
            key = TrajectoryId("train", 0, "t", sample)
            reward = None if sample else 1.0
            store.append(Trajectory(id=key, outcome=Outcome.COMPLETED, steps=steps, reward=reward, task={"id": "t"}))


def test_datasets_reads_it(tmp_path):
    write_store(tmp_path / "store")
    files = str(tmp_path / "store" / "*.parquet")
    table = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(table) == 3
    row = table[0]
    assert (row["id"], row["reward"], row["outcome"], row["turns"]) == ("train/0/t/0/0", 1.0, "completed", 2)
    first, second = row["steps"]
    assert (first["new_ids"], first["response_ids"], first["logprobs"]) == ([1, 2], [3], [-0.5])
    assert (second["parent"], second["keep"], second["new_ids"], second["logprobs"]) == (0, 3, [4], [])
    assert json.loads(first["new_messages"]) == [{"role": "user", "content": "hi"}]
    assert table[1]["steps"][0]["new_ids"] is None
    assert table[1]["reward"] is None
    assert table[2]["steps"] == []
    lazily = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    assert [row["id"] for row in lazily] == table["id"][:]


READER = """
import sys

def refuse(event, args):
    if event == "pickle.find_class":
        raise SystemExit(f"unpickled {args}")

from stepgym.record.store import TrajectoryStore
import pickle
sys.addaudithook(refuse)
def refused(*args, **kwargs):
    raise SystemExit("unpickled")
pickle.load = pickle.loads = pickle.Unpickler = refused
store = TrajectoryStore(sys.argv[1])
print(len(list(store)), store.table(where=None).num_rows, store.load("train/0/t/0/0").reward)
"""


def test_reading_unpickles_nothing(tmp_path):
    write_store(tmp_path)
    done = subprocess.run([sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("3 3 1.0\n", 0), done.stderr


def test_no_column_could_hold_a_pickle():
    types = str(SCHEMA) + str(STEP_TYPE)
    assert "binary" not in types
    assert "extension" not in types
