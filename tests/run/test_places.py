"""Rollouts that share places: never more episodes than places, earlier rollouts first, nothing lost by a cancel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepgym.env.task import Task
from stepgym.run.places import Places
from stepgym.run.rollouts import RolloutConfig, collect


def test_the_lowest_rank_is_served_first_and_equals_in_their_order() -> None:
    served: list[str] = []

    async def one(places: Places, name: str, rank: int) -> None:
        async with places.take(rank):
            served.append(name)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        places = Places(1)
        names = [("first", 5), ("late", 2), ("early", 1), ("early too", 1), ("last", 9)]
        await asyncio.gather(*(one(places, name, rank) for name, rank in names))

    asyncio.run(all_of_them())
    assert served == ["first", "early", "early too", "late", "last"]


def test_whoever_comes_back_at_once_is_before_a_later_rank() -> None:
    """The worker of an earlier rollout that takes its next episode is not overtaken by a later rollout."""
    served: list[str] = []

    async def worker(places: Places, name: str, rank: int) -> None:
        for number in range(3):
            async with places.take(rank):
                served.append(f"{name}{number}")
                await asyncio.sleep(0.001)

    async def both() -> None:
        places = Places(1)
        await asyncio.gather(worker(places, "a", 1), worker(places, "b", 2))

    asyncio.run(both())
    assert served == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_place_survives_whoever_gave_up_waiting_for_it() -> None:
    async def waits(places: Places) -> None:
        async with places.take():
            await asyncio.sleep(1)

    async def run() -> None:
        places = Places(1)
        async with places.take():
            waiting = [asyncio.create_task(waits(places)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
        await asyncio.sleep(0)  # the place is given away in this turn of the loop, to the second
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(1), places.take():
            pass
        async with asyncio.timeout(1), places.take():
            pass

    asyncio.run(run())


def test_no_places_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="1 or more, not 0"):
        Places(0)


def test_two_rollouts_share_places_and_the_earlier_one_is_served_first(
    parrot: Any, counts: Any, count_env: Any
) -> None:
    now, most, begun = [0], [0], []

    class Watched(count_env):  # type: ignore[misc]
        def begin(self, task: Task) -> Any:
            now[0] += 1
            most[0] = max(most[0], now[0])
            begun.append(task.id)
            return super().begin(task)

        def close(self) -> None:
            now[0] -= hasattr(self, "next")  # not the one that was made to look at

    async def both() -> None:
        places = Places(3)
        engine = parrot(counts, delay=0.002)

        async def lot(number: int) -> None:
            tasks = [Task(id=f"{number}-{n}", prompt="Count.") for n in range(4)]
            config = RolloutConfig(samples=2, concurrency=3)
            found = await collect(Watched, tasks, engine, config=config, places=places, rank=number)
            assert len(found) == 8

        first = asyncio.create_task(lot(1))
        while not begun:
            await asyncio.sleep(0.001)
        await asyncio.gather(first, lot(2))

    asyncio.run(both())
    assert most[0] == 3
    assert now[0] == 0
    # The second has a place when all eight of the first have had one; two of these may not have begun by then.
    assert all(name.startswith("1-") for name in begun[:6])
    assert len(begun) == 16


def test_samples_may_be_named(parrot: Any, counts: Any, count_env: Any) -> None:
    tasks = [Task(id="a", prompt="Count."), Task(id="b", prompt="Count.")]
    wanted = {"a": [4], "b": [2, 7]}
    found = asyncio.run(collect(count_env, tasks, parrot(counts), samples=wanted))
    assert [(t.id.task_id, t.id.sample) for t in found] == [("a", 4), ("b", 2), ("b", 7)]
