"""The metrics of a run reach everything, once, whatever fails; resumed runs go on where they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stepgym.train.sinks.base import RunInfo, Sink

Logged = Callable[..., Any]
MakeRow = Callable[..., dict[str, Any]]
told: list[tuple[Any, ...]] = []


class Memory(Sink):
    """Remembers what it is told, and fails where it is told to."""

    def __init__(self, *, fails_at: tuple[int, ...] = (), opens: bool = True) -> None:
        self._fails_at = fails_at
        self._opens = opens

    @property
    def address(self) -> str:
        return "in memory"

    def open(self, run: RunInfo) -> None:
        if not self._opens:
            raise ConnectionError("no route\nto host")
        told.append(("open", run.id, run.after, dict(run.config)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self._fails_at:
            raise TimeoutError(f"step {step}")
        told.append(("write", step, dict(metrics)))

    def alarm(self, step: int, name: str, text: str) -> None:
        told.append(("alarm", step, name))

    def close(self, summary: Mapping[str, float] | None) -> None:
        told.append(("close", summary))


class CutsBack(Memory):
    """Takes back what was written after the iteration that a run goes on from."""

    cuts_back = True


MEMORY = {"kind": f"{__name__}:Memory"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    told.clear()


def written() -> list[int]:
    return [entry[1] for entry in told if entry[0] == "write"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_rows_reach_the_file_the_observer_and_the_sinks(tmp_path: Path, logged: Logged, make_row: MakeRow) -> None:
    recipe = {"engine": {"kind": "openai", "api_key": "sk-1"}, "model": {"special_tokens": ["<a>"], "token": None}}
    with logged(tmp_path / "run", {"sinks": [MEMORY]}, recipe=recipe) as (log, notes):
        log.add({"iteration": 0, "warm_start": {"loss": 1.0}})
        log.iteration(1, make_row(1))
        log.iteration(2, make_row(2, flag=True))
        log.close({"success_after": 0.5, "model": "a/b", "greedy_after": None})
        log.close(None)
    assert [entry["iteration"] for entry in lines(tmp_path / "run")] == [0, 1, 2]
    assert notes.iterations == [1, 2]
    assert notes.notes == [f"{__name__}:Memory: in memory"]
    hidden = {"engine": {"kind": "openai", "api_key": "hidden"}, "model": {"special_tokens": ["<a>"], "token": None}}
    assert told[0] == ("open", told[0][1], None, hidden)
    assert told[1] == ("write", 1, {"iteration": 1.0, "reward_mean": 0.1})  # neither NaN nor None
    assert told[2] == ("write", 2, {"iteration": 2.0, "reward_mean": 0.2, "flag": 1.0})
    assert told[3:] == [("close", {"success_after": 0.5})]


def test_a_resumed_run_writes_no_iteration_twice(tmp_path: Path, logged: Logged, make_row: MakeRow) -> None:
    def play(after: int | None, last: int, kind: str) -> None:
        with logged(tmp_path / kind, {"sinks": [{"kind": f"{__name__}:{kind}"}]}, after) as (log, _):
            for number in range((after or 0) + 1, last + 1):
                log.iteration(number, make_row(number))

    play(None, 5, "Memory")
    play(3, 7, "Memory")  # killed after 5, goes on after the checkpoint of 3
    play(None, 8, "Memory")  # the checkpoints were lost: all of it again
    assert written() == [1, 2, 3, 4, 5, 6, 7, 8]
    opened = [entry for entry in told if entry[0] == "open"]
    assert len({entry[1] for entry in opened}) == 1
    assert opened[0][1]
    assert [entry[2] for entry in opened] == [None, 3, None]
    assert [entry["iteration"] for entry in lines(tmp_path / "Memory")] == list(range(1, 9))
    told.clear()
    play(None, 5, "CutsBack")
    play(3, 6, "CutsBack")
    assert written() == [1, 2, 3, 4, 5, 4, 5, 6]


def test_a_sink_that_fails_is_a_line_and_the_run_goes_on(tmp_path: Path, logged: Logged, make_row: MakeRow) -> None:
    sink = {**MEMORY, "fails_at": [2, 4, 5, 6]}
    with logged(tmp_path / "run", {"sinks": [sink]}) as (log, notes):
        for number in range(1, 9):
            log.iteration(number, make_row(number))
        log.close({})
    assert written() == [1, 3]
    assert [note.partition("Memory: ")[2] for note in notes.notes] == [
        "in memory",
        "TimeoutError: step 2; it is tried again",
        "TimeoutError: step 4; it is tried again",
        "TimeoutError: step 6; the run goes on without it; metrics.jsonl has everything",
    ]
    assert [entry["iteration"] for entry in lines(tmp_path / "run")] == list(range(1, 9))


def test_a_sink_that_does_not_open_is_told_once(tmp_path: Path, logged: Logged, make_row: MakeRow) -> None:
    with logged(tmp_path / "run", {"sinks": [{**MEMORY, "opens": False}]}) as (log, notes):
        log.iteration(1, make_row(1))
        log.close(None)
    assert told == []
    assert notes.notes == [
        f"sink {__name__}:Memory: ConnectionError: no route to host; the run goes on without it; "
        "metrics.jsonl has everything"
    ]


def test_alarms_reach_everything_and_are_known_to_a_resumed_run(
    tmp_path: Path, logged: Logged, make_row: MakeRow
) -> None:
    path, wrong = tmp_path / "run", {"truncated_rate": 0.9}
    with logged(path, {"sinks": [MEMORY]}) as (log, notes):
        for number in range(1, 4):
            log.iteration(number, make_row(number, **wrong))
    assert [(entry["iteration"], entry.get("alarm/responses_cut_off")) for entry in lines(path)] == [
        (1, None), (2, 1), (3, None),
    ]  # fmt: skip
    assert [note for note in notes.notes if note.startswith("alarm: responses_cut_off: 90% of turns")]
    assert ("alarm", 2, "responses_cut_off") in told
    with logged(path, {}, 2) as (log, notes):
        log.iteration(3, make_row(3, **wrong))
        assert [(alarm.name, alarm.iteration) for alarm in log.alarms] == [("responses_cut_off", 2)]
    assert notes.notes == []


def test_an_alarm_of_an_iteration_that_is_done_again_is_not_told_again(
    tmp_path: Path, logged: Logged, make_row: MakeRow
) -> None:
    for after, first in ((None, 1), (1, 2)):
        with logged(tmp_path / "run", {"sinks": [MEMORY]}, after) as (log, _):
            for number in range(first, 3):
                log.iteration(number, make_row(number, truncated_rate=0.9))
            assert [alarm.iteration for alarm in log.alarms] == [2]
    assert [entry[0] for entry in told] == ["open", "write", "alarm", "write", "open"]


def test_alarms_can_be_off(tmp_path: Path, logged: Logged, make_row: MakeRow) -> None:
    with logged(tmp_path / "run", {"alarms": False}) as (log, notes):
        for number in range(1, 4):
            log.iteration(number, make_row(number, truncated_rate=0.9))
        assert (log.alarms, notes.notes) == ([], [])
