from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.trajectory import TrajectoryId


@settings(deadline=None)
@given(st.text(), st.integers(), st.integers(0), st.integers(0))
def test_an_id_reads_back(task_id, iteration, sample, attempt):
    key = TrajectoryId("train", iteration, task_id, sample, attempt)
    assert TrajectoryId.parse(str(key)) == key


def test_a_group_is_phase_iteration_and_task():
    keys = [TrajectoryId("train", 2, "a/b", sample, attempt) for sample in (0, 1) for attempt in (0, 1)]
    assert {key.group for key in keys} == {("train", 2, "a/b")}
    assert sorted(keys, reverse=True)[-1] == keys[0]


@pytest.mark.parametrize("text", ["", "train", "train/0/t", "train/x/t/0/0", "train/0/t/0/one"])
def test_other_texts_are_no_ids(text):
    with pytest.raises(ValueError, match=r".+"):
        TrajectoryId.parse(text)
