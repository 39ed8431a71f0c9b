"""The thread that a `Batcher` runs in, and the way to it from any event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepgym.errors import EngineError
from stepgym.model.engines.base import Completion
from stepgym.model.engines.batcher import Batcher, Request

logger = logging.getLogger(__name__)


class Driver:
    """Steps a batcher in a daemon thread for as long as it has requests.

    Args:
        batcher: Touched by this thread only, or while `paused()`.
        threads: Cores that one operation of torch may use; None leaves torch's own setting.
    """

    def __init__(self, batcher: Batcher, *, threads: int | None = None) -> None:
        self.batcher = batcher
        self._torch_threads = threads
        self._condition = threading.Condition()
        self._incoming: list[Request] = []
        self._pauses = 0
        self._stepping = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Hand a request over. Raises `EngineError` after `close`."""
        with self._condition:
            if self._closed:
                raise EngineError("the engine is closed")
            self._incoming.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stepgym-engine", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def close(self) -> None:
        """Stop; requests that still run fail. Safe to call twice, from any thread."""
        with self._condition:
            self._closed = True
            if self._thread is None:
                self._abandon()
            self._condition.notify_all()

    @contextmanager
    def paused(self) -> Iterator[Batcher]:
        """No forward pass runs inside this block; requests wait. Blocks until the pass that is running is done."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine's own thread cannot pause itself")
        with self._condition:
            self._pauses += 1
            while self._stepping:
                self._condition.wait()
        try:
            yield self.batcher
        finally:
            with self._condition:
                self._pauses -= 1
                self._condition.notify_all()

    def _run(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        while True:
            with self._condition:
                self._stepping = False
                self._condition.notify_all()
                while not self._closed and (self._pauses or not (self._incoming or self.batcher.busy)):
                    self._condition.wait()
                if self._closed:
                    self._abandon()
                    return
                self._stepping = True
                incoming, self._incoming = self._incoming, []
            for request in incoming:
                self.batcher.add(request)
            try:
                with torch.inference_mode():
                    self.batcher.step()
            except Exception as error:
                logger.exception("the model failed; every running request fails with it")
                text = str(error).strip().splitlines()
                self.batcher.fail(f"the model failed: {type(error).__name__}: {text[0] if text else ''}")

    def _abandon(self) -> None:
        for request in self._incoming:
            request.settle(EngineError("the engine was closed"))
        self._incoming = []
        self.batcher.fail("the engine was closed")


def settler(future: asyncio.Future[Completion]) -> Callable[[Completion | BaseException], None]:
    """A function that any thread may call to settle a future of the event loop that runs now."""
    loop = asyncio.get_running_loop()

    def set_if_waiting(value: Any) -> None:
        if future.done():
            return
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)

    def settle(value: Completion | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(set_if_waiting, value)
        except RuntimeError:
            pass  # the loop has closed: nobody waits any more

    return settle
