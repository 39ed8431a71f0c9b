from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from stepgym.env.worker import DaemonThreads, call_hook, run_blocking, start_background, threads


def test_calls_run_in_threads_that_are_used_again() -> None:
    pool = DaemonThreads()

    async def several(count: int) -> set[int]:
        return set(await asyncio.gather(*(pool.run(threading.get_ident) for _ in range(count))))

    used: set[int] = set()
    for _ in range(50):
        used |= asyncio.run(several(1))
    assert threading.get_ident() not in used
    # A call's answer may arrive a moment before its thread is idle again, so a second thread or third may start.
    assert len(used) < 10


def test_exceptions_reach_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    def stop() -> None:
        raise StopIteration("x")

    with pytest.raises(KeyError):
        asyncio.run(threads.run(fail))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(threads.run(stop))


def test_a_hung_call_can_be_given_up_and_others_go_on() -> None:
    release = threading.Event()

    async def play() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run(release.wait), 0.05)
        return await threads.run(lambda: 5)

    assert asyncio.run(play()) == 5
    release.set()


def test_a_hung_call_does_not_hold_up_the_end_of_the_process() -> None:
    code = """
import asyncio, time
from stepgym.env.worker import threads
async def play():
    try:
        await asyncio.wait_for(threads.run(time.sleep, 600), 0.05)
    except TimeoutError:
        print("given up")
asyncio.run(play())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "given up\n")


def test_hooks_may_be_sync_or_async_or_return_an_awaitable() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value

    for hook in (later, lambda value: value, lambda value: later(value)):
        assert asyncio.run(call_hook(hook, 3)) == 3


def test_blocking_works_within_a_loop_and_within_itself() -> None:
    async def leaf() -> str:
        return threading.current_thread().name

    async def nested() -> str:
        return run_blocking(leaf())  # on the very thread whose loop runs this

    async def outer() -> list[str]:
        return [run_blocking(nested())]

    assert run_blocking(leaf()) == "stepgym-loop"
    assert asyncio.run(outer()) == ["stepgym-loop"]
    before = threading.active_count()
    for _ in range(5):
        run_blocking(nested())
    assert threading.active_count() == before


def _in_child(queue: Any) -> None:
    async def work() -> int:
        return await threads.run(lambda: 7)

    queue.put(run_blocking(work()))


def test_work_in_the_background_goes_on_beside_this_thread_and_can_be_ended() -> None:
    cleaned = threading.Event()

    async def work(seconds: float, answer: int) -> int:
        try:
            await asyncio.sleep(seconds)
        finally:
            cleaned.set()
        return answer

    async def fails() -> None:
        raise KeyError("x")

    slow, quick, failing = start_background(work(60, 1)), start_background(work(0, 2)), start_background(fails())
    assert quick.result() == 2
    assert quick.done
    with pytest.raises(KeyError):
        failing.result()
    cleaned.clear()
    assert not slow.done
    slow.cancel()
    assert slow.done
    assert cleaned.is_set()
    with pytest.raises(concurrent.futures.CancelledError):
        slow.result()
    never_begun = start_background(work(60, 3))
    started = time.monotonic()
    never_begun.cancel()
    never_begun.cancel()
    assert time.monotonic() - started < 10
    assert run_blocking(work(0, 4)) == 4


def test_a_forked_process_has_threads_and_a_loop_of_its_own() -> None:
    async def work() -> None:
        await threads.run(time.sleep, 0)

    run_blocking(work())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=30) == 7
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_hook_that_would_end_the_process_fails_alone(error: BaseException) -> None:
    """Raised on the loop itself, either would end the loop, and whoever waits for it would wait for ever."""

    def sync() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    async def play() -> str:
        for hook in (sync, coroutine):
            with pytest.raises(RuntimeError, match=type(error).__name__):
                await asyncio.wait_for(call_hook(hook), 5)
        return "the loop goes on"

    assert run_blocking(play()) == "the loop goes on"


def test_an_interrupt_lets_what_was_going_on_end_in_order() -> None:
    code = """
import asyncio, os, signal, threading
from stepgym.env.worker import run_blocking

async def work():
    try:
        print("working", flush=True)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.2)
        print("written", flush=True)

try:
    run_blocking(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "working\nwritten\ninterrupted\n", "")
