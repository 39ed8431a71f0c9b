"""What overlap and staleness mean, what is refused, and that lots are played ahead and consumed in order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coin import RECIPE

from stepgym.errors import UserError
from stepgym.record.step import Step
from stepgym.train.loop import check_training
from stepgym.train.lots import Lot, Lots
from stepgym.train.overlap import OverlapConfig, staleness, staleness_metrics
from stepgym.train.recipe import check_recipe


def spans(make: SimpleNamespace, *steps: Sequence[tuple[str, int, int]]) -> Any:
    """A trajectory whose steps were sampled by these weights."""
    made = [Step(prompt_ids=[1, 2], response_ids=[3] * 9, weights_versions=tuple(one)) for one in steps]
    return SimpleNamespace(steps=made)


def test_staleness_counts_from_the_oldest_weights_of_a_trajectory(make: SimpleNamespace) -> None:
    one = spans(make, [("7", 0, 9)], [("7", 0, 4), ("9", 4, 9)])
    assert staleness(one, 9) == 2
    assert staleness(one, 7) == 0
    assert staleness(spans(make, [("9", 0, 9)]), 12) == 3
    assert staleness(spans(make, [("10", 0, 9)], [("9", 0, 9)]), 12) == 3  # as numbers, not as text
    assert staleness(spans(make), 5) is None
    assert staleness(spans(make, [("initial", 0, 9)]), 5) is None
    known = [one, spans(make, [("9", 0, 9)]), spans(make)]
    assert staleness_metrics(known, 9) == {"staleness_mean": 1.0, "staleness_max": 2.0}
    assert staleness_metrics([spans(make)], 9) == {}


def test_lots_ahead_by_kind() -> None:
    assert OverlapConfig().ahead == 0
    assert OverlapConfig(kind="one_step_off").ahead == 1
    assert (OverlapConfig(kind="async").ahead, OverlapConfig(kind="async", lookahead=3).ahead) == (1, 3)
    assert OverlapConfig(kind="async").publishes_in_flight
    assert not OverlapConfig(kind="one_step_off").publishes_in_flight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": "asynchronous"}, r"overlap\.kind.*'asynchronous'|overlap.*none.*one_step_off.*async"),
        ({"overlap": {"kind": "one_step_off", "lookahead": 2}}, "'lookahead' has no effect with kind 'one_step_off'"),
        ({"overlap": {"max_staleness": 2}}, "'max_staleness' has no effect with kind 'none'"),
        ({"overlap": {"kind": "async", "staleness": 2}}, "unknown|did you mean"),
        (
            {"overlap": "async", "algorithm": {"correction": "none"}},
            r"overlap\.kind: async learns from .* choose a correction",
        ),
        (
            {"overlap": {"kind": "async", "max_staleness": 3}, "algorithm": {"mini_batches": 2, "epochs": 2}},
            r"overlap\.max_staleness: 3 is less than the 4 updates of one iteration",
        ),
        (
            {"overlap": "async", "engine": {"kind": "vllm", "sleep_level": 1}},
            r"engine\.sleep_level: the servers cannot give .* use 0",
        ),
        ({"overlap": "async", "engine": {"kind": "transformers", "revision": "x"}}, r"engine\.revision: in training"),
        ({"refill": {"rounds": 1}, "rollout": {"samples": 1}}, r"refill\.rounds: with rollout\.samples: 1"),
        ({"refill": {"rounds": 1}, "algorithm": {"credit": "reinforce"}}, r"refill\.rounds: with credit 'reinforce'"),
        ({"refill": {"rounds": -1}}, r"refill\.rounds"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        check_training(check_recipe({**RECIPE, **changes}, Path("x.yaml")))
    assert "\n" not in str(refused.value)


def test_what_works_is_let_through() -> None:
    for changes in (
        {"overlap": "one_step_off"},
        {"overlap": {"kind": "async", "lookahead": 2, "max_staleness": 4}, "algorithm": {"mini_batches": 4}},
        {"overlap": {"kind": "async"}, "engine": {"kind": "transformers", "device": "cpu", "dtype": "float32"}},
        {"overlap": "async", "engine": {"kind": "vllm"}},
        {"overlap": {"kind": "async"}, "algorithm": {"correction": "none"}, "budget": {"iterations": 0}},
        {"refill": {"rounds": 2}},
    ):
        check_training(check_recipe({**RECIPE, **changes}, Path("x.yaml")))


class Player:
    """Plays lots that last until they are told to end."""

    def __init__(self, failing: int = 0) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.failing = failing
        self.may_end = {number: threading.Event() for number in range(1, 9)}

    async def play(self, iteration: int) -> Lot:
        self.begun.append(iteration)
        try:
            while not self.may_end[iteration].is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(iteration)
            raise
        if iteration == self.failing:
            raise UserError(f"lot {iteration} cannot be played")
        return Lot(iteration, ())


def test_lots_are_begun_ahead_and_taken_in_order() -> None:
    player = Player()
    lots = Lots(player.play, ahead=2, last=4)
    lots.begin(1)
    for number in (3, 2, 1):  # they end in another order
        player.may_end[number].set()
    assert lots.take(1).iteration == 1
    assert player.begun == [1, 2, 3]
    lots.begin(2)
    player.may_end[4].set()
    assert [lots.take(number).iteration for number in (2, 3)] == [2, 3]
    lots.begin(4)  # the last: none is begun beyond it
    lots.join()
    assert lots.take(4).iteration == 4
    assert player.begun == [1, 2, 3, 4]
    lots.close()
    assert player.cancelled == []


def test_without_overlap_a_lot_begins_when_it_is_asked_for() -> None:
    player = Player()
    for event in player.may_end.values():
        event.set()
    lots = Lots(player.play, ahead=0, last=3)
    for number in (1, 2, 3):
        lots.begin(number)
        lots.join()
        assert player.begun[-1] == number
        assert lots.take(number).iteration == number


def test_a_lot_that_fails_is_told_when_its_turn_comes_and_the_others_are_ended() -> None:
    player = Player(failing=2)
    lots = Lots(player.play, ahead=2, last=8)
    lots.begin(1)
    player.may_end[2].set()
    player.may_end[1].set()
    assert lots.take(1).iteration == 1
    with pytest.raises(UserError, match="lot 2"):
        lots.join()
    lots.begin(2)
    assert player.begun == [1, 2, 3]  # none is begun after one that failed
    with pytest.raises(UserError, match="lot 2"):
        lots.take(2)
    lots.close()
    assert player.cancelled == [3]
    lots.close()


def test_what_is_in_flight_ends_when_its_run_does() -> None:
    player = Player()
    lots = Lots(player.play, ahead=3, last=8)
    lots.begin(1)
    taken: list[BaseException] = []

    def wait() -> None:
        try:
            lots.take(1)
        except BaseException as error:
            taken.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    lots.close()
    waiter.join(10)
    assert sorted(player.cancelled) == sorted(player.begun)
    assert [type(error) for error in taken] == [concurrent.futures.CancelledError]
