from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from stepgym import Env
from stepgym.env.shared import close_shared, get_shared


class Resource:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Sharing(Env):
    opened: ClassVar[list[Resource]] = []

    def __init__(self, *, size: int = 1) -> None:
        self.size = size

    @classmethod
    def open_shared(cls, **config: Any) -> Any:
        cls.opened.append(Resource(config))
        return cls.opened[-1]


class AsyncSharing(Sharing):
    opened: ClassVar[list[Resource]] = []

    @classmethod
    async def open_shared(cls, **config: Any) -> Any:
        await asyncio.sleep(0)
        return super().open_shared(**config)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for cls in (Sharing, AsyncSharing):
        close_shared(cls)
        cls.opened.clear()


@pytest.mark.parametrize("cls", [Sharing, AsyncSharing])
def test_one_per_class_and_config_whoever_asks(cls: type[Sharing]) -> None:
    found: list[Any] = []
    asking = [threading.Thread(target=lambda: found.append(cls().shared)) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(cls.opened) == 1
    assert all(resource is cls.opened[0] for resource in found)
    assert cls(size=1).shared is found[0]
    assert cls(size=2).shared is not found[0]
    assert cls.opened[1].config == {"size": 2}


def test_closing_closes_once_and_the_next_use_opens_anew() -> None:
    first, other = Sharing().shared, AsyncSharing().shared
    close_shared(Sharing)
    close_shared(Sharing)
    assert (first.closed, other.closed) == (1, 0)
    assert Sharing().shared is not first
    close_shared()
    assert other.closed == 1


def test_a_failing_close_is_logged_and_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Sharing(size=1).shared, Sharing(size=2).shared

    def fail() -> None:
        raise OSError("stuck")

    bad.close = fail
    with caplog.at_level(logging.ERROR):
        close_shared(Sharing)
    assert good.closed == 1
    assert "stuck" in caplog.text


def test_a_failure_to_open_is_tried_again() -> None:
    class Flaky(Sharing):
        opened: ClassVar[list[Resource]] = []
        attempts = 0

        @classmethod
        def open_shared(cls, **config: Any) -> Any:
            cls.attempts += 1
            if cls.attempts == 1:
                raise OSError("not yet")
            return super().open_shared(**config)

    with pytest.raises(OSError, match="not yet"):
        _ = Flaky().shared
    assert Flaky().shared is Flaky.opened[0]
    close_shared(Flaky)


def test_opening_one_does_not_wait_for_another() -> None:
    release = threading.Event()

    class Slow(Sharing):
        opened: ClassVar[list[Resource]] = []

        @classmethod
        def open_shared(cls, **config: Any) -> Any:
            release.wait(30)
            return "slow"

    waiting = threading.Thread(target=lambda: Slow().shared, daemon=True)
    waiting.start()
    assert Sharing().shared is Sharing.opened[0]
    release.set()
    waiting.join()
    close_shared(Slow)


def _in_child(queue: Any) -> None:
    queue.put(Sharing().shared.config)
    queue.put(len(Sharing.opened))
    close_shared()
    queue.put([resource.closed for resource in Sharing.opened])


def test_a_forked_process_opens_its_own_and_leaves_its_parents_alone() -> None:
    mine = get_shared(Sharing, {"size": 1})
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    try:
        assert [queue.get(timeout=30) for _ in range(3)] == [{"size": 1}, 2, [0, 1]]
    finally:
        child.kill()
        child.join()
    assert mine.closed == 0
