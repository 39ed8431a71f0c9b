"""Promise 15: "A killed run resumes: no trajectory lost that was reported finished, none doubled."

Here for the store: a writer process is killed with SIGKILL again and again while it writes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter

import pyarrow.parquet as pq

from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import TrajectoryId

WRITER = """
import sys
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId

store = TrajectoryStore(sys.argv[1], "a", flush_every=7, flush_seconds=0.02)
for number in range(10**9):
    key = TrajectoryId("train", 0, "task", number)
    if key in store:
        continue
    store.append(Trajectory(
        id=key, outcome=Outcome.COMPLETED, steps=[Step(prompt_ids=[number] * 50, response_ids=[number + 1] * 50)]
    ))
    if number % 5 == 0:
        for done in store.flush():
            print(done, flush=True)
"""


def write_until_killed(folder: str, seconds: float) -> list[str]:
    """Run the writer, kill it some time after its first report, and return the ids it reported as durable."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(seconds)
    process.kill()
    rest = process.stdout.read()
    process.wait()
    complete, _, _ = (first + rest).rpartition("\n")  # the last line may have been cut short
    return complete.splitlines()


def test_what_was_reported_is_there_once(tmp_path):
    delays = random.Random(0)
    reported: list[TrajectoryId] = []
    for _ in range(5):
        new = [TrajectoryId.parse(line) for line in write_until_killed(str(tmp_path), delays.uniform(0, 0.15))]
        assert new
        reported += new
        present = Counter(t.id for t in TrajectoryStore(tmp_path))
        assert all(present[key] == 1 for key in reported)
    assert max(Counter(reported).values()) == 1

    with TrajectoryStore(tmp_path, "a") as store:
        assert list(tmp_path.glob(".writing-*")) == []
        for trajectory in store:
            number = trajectory.id.sample
            assert trajectory.steps[0].full_ids.tolist() == [number] * 50 + [number + 1] * 50
    rows = Counter(row for shard in tmp_path.glob("*.parquet") for row in pq.read_table(shard)["id"].to_pylist())
    assert set(rows.values()) == {1}
    assert len(rows) >= len(reported)
