"""TensorBoard event files, read back by TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="needs the package tensorboard: pip install 'stepgym[tensorboard]'")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(event.step, round(event.value, 6)) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_what_is_written_is_read_back_and_a_resumed_run_has_no_step_twice(
    tmp_path: Path, logged: Callable[..., Any], make_row: Callable[..., dict[str, Any]]
) -> None:
    path = tmp_path / "sql-tiny" / "run"
    with logged(path, {"sinks": ["tensorboard"]}, recipe={"seed": 3}) as (log, notes):
        for number in range(1, 6):
            log.iteration(number, make_row(number, **{"outcome/completed": 8}))
    assert notes.notes == [f"tensorboard: tensorboard --logdir {path / 'tensorboard'}"]
    assert scalars(path / "tensorboard")["reward_mean"] == [(number, number / 10) for number in range(1, 6)]
    with logged(path, {"sinks": ["tensorboard"]}, 3) as (log, _):  # killed: never closed
        for number in range(4, 8):
            log.iteration(number, make_row(number, reward_mean=-number))
        log.close({"success_after": 0.9})
    found = scalars(path / "tensorboard")
    assert found["reward_mean"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, -4.0), (5, -5.0), (6, -6.0), (7, -7.0)]
    assert [step for step, _ in found["outcome/completed"]] == [1, 2, 3]
    assert "kl" not in found


def test_in_another_folder_each_run_has_its_own(
    tmp_path: Path, logged: Callable[..., Any], make_row: Callable[..., dict[str, Any]]
) -> None:
    for name in ("one", "two"):
        sink = {"kind": "tensorboard", "folder": str(tmp_path / "board")}
        with logged(tmp_path / "runs" / name, {"sinks": [sink]}) as (log, _):
            log.iteration(1, make_row(1))
            log.close({})
        assert scalars(tmp_path / "board" / "runs" / name)["reward_mean"] == [(1, 0.1)]
