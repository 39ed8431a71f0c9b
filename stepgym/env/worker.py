"""Runs blocking calls off the event loop, in daemon threads that a hung call cannot turn into a hung process.

`asyncio.to_thread` would wait for a hung call when the process ends; a daemon thread is simply left behind.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

INTERRUPT_SECONDS = 20.0
"""How long an interrupted process waits for what was going on to end in order."""


class DaemonThreads:
    """A pool without a bound: a call takes an idle thread or starts one, so a hung call costs one thread only."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew with no threads. A forked process must: it has its parent's queues but not their threads."""
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
    """What a call raised, as something that can be awaited.

    StopIteration cannot be set on a future. SystemExit and KeyboardInterrupt (a hook that calls `sys.exit()`, say)
    would end the event loop and so hang everybody else: only the call that raised one has failed.
    """
    if isinstance(error, StopIteration | SystemExit | KeyboardInterrupt):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


threads = DaemonThreads()


class Background(Generic[T]):
    """A coroutine at work on the loop in the background. Made by `start_background`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        loop.call_soon_threadsafe(self._begin, coroutine)

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._future.done()

    @property
    def failed(self) -> bool:
        """Whether it has ended by an error, or was cancelled."""
        return self._future.done() and self._future.exception() is not None

    def result(self) -> T:
        """Wait for its end. Returns what it returned, or raises what it raised.

        It is this thread that Ctrl-C interrupts. The coroutine, on the other one, is cancelled then and given a moment
        to write what it has and give back what it holds.
        """
        try:
            return self._future.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel it and wait until it has ended, `INTERRUPT_SECONDS` at most. Its error, if any, is not raised."""
        self._loop.call_soon_threadsafe(self._cancel)
        concurrent.futures.wait([self._future], INTERRUPT_SECONDS)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._settle)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())


class _LoopThread:
    """One event loop on a daemon thread, for callers without a loop (or inside one that they cannot await on)."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew with no loop; see `DaemonThreads.forget`."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Background[T]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="stepgym-loop", daemon=True)
                self._thread.start()
            return Background(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            # A coroutine on this very loop called something synchronous that needs a loop (an environment that plays
            # another one). Waiting here for this loop would wait for ever, so the inner call gets a loop of its own.
            return _LoopThread().run_once(coroutine)
        return self.start(coroutine).result()

    def run_once(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on a loop that ends with the coroutine."""
        try:
            return self.run(coroutine)
        finally:
            loop, thread = self._loop, self._thread
            if loop is not None and thread is not None:
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()


_loop_thread = _LoopThread()
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=threads.forget)
    os.register_at_fork(after_in_child=_loop_thread.forget)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, also where a loop is already running in this thread."""
    return _loop_thread.run(coroutine)


def start_background(coroutine: Coroutine[Any, Any, T]) -> Background[T]:
    """Let a coroutine run on the loop that `run_blocking` uses, while this thread does something else."""
    return _loop_thread.start(coroutine)


async def call_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook that may be sync or async: async ones are awaited, sync ones run in a daemon thread.

    What a sync hook returns is awaited too if it can be, as in `def begin(self, task): return super().begin(task)`
    over an async `begin`.
    """
    result = hook(*args) if inspect.iscoroutinefunction(hook) else await threads.run(hook, *args)
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:
        raise _awaitable(error) from error
