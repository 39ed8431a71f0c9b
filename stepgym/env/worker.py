"""Runs blocking calls off the event loop, in daemon threads that a hung call cannot turn into a hung process.

`asyncio.to_thread` would wait for a hung call when the process ends; a daemon thread is simply left behind.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """A pool without a bound: a call takes an idle thread or starts one, so a hung call costs one thread and no more."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[tuple[Callable[[], None]]]] = []
        self._lock = threading.Lock()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` in a daemon thread and await its result. Cancelling abandons the thread to its fate."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # handed to the awaiting coroutine, whatever it is
                settle(future.set_exception, _awaitable(error))
            else:
                settle(future.set_result, result)

        def settle(setter: Callable[[Any], None], value: Any) -> None:
            def set_if_waiting() -> None:
                if not future.done():
                    setter(value)

            try:
                loop.call_soon_threadsafe(set_if_waiting)
            except RuntimeError:
                pass  # the loop has closed: nobody waits any more

        self._submit(work)
        return await future

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            queue = self._idle.pop() if self._idle else None
        if queue is None:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), name="stepgym-worker", daemon=True).start()
        queue.put((work,))

    def _serve(self, queue: SimpleQueue[tuple[Callable[[], None]]]) -> None:
        while True:
            (work,) = queue.get()
            work()
            del work
            with self._lock:
                self._idle.append(queue)


def _awaitable(error: BaseException) -> BaseException:
    """StopIteration cannot be set on a future; anything else can."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"StopIteration: {error}")
    return error


threads = DaemonThreads()


class _LoopThread:
    """One event loop on a daemon thread, for callers without a loop (or inside one that they cannot await on)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="stepgym-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


_loop_thread = _LoopThread()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, also where a loop is already running in this thread."""
    return _loop_thread.run(coroutine)


async def call_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook that may be sync or async: async ones are awaited, sync ones run in a daemon thread."""
    if inspect.iscoroutinefunction(hook):
        return await hook(*args)
    return await threads.run(hook, *args)
