"""The connections to a server, and an event loop of their own to wait on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from stepgym_search.retrievers.base import RetrieverError

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_SECONDS = 10.0


class Connections:
    """An HTTP client, and an event loop for it on a daemon thread, for callers on other threads.

    On an event loop every wait can be given up when its time is over, even one for the next byte of a status line; a
    blocking client cannot do that.

    Args:
        url: What messages say the connections lead to.
        most: Most connections.
        proxies: Whether to use the proxies that the environment names.

    Attributes:
        client: The client, to be used on the event loop only.
        free: Taken for each request.
        probing: Held by whoever finds out what the server takes.
    """

    def __init__(self, url: str, most: int, *, proxies: bool) -> None:
        import httpx

        self.free = asyncio.Semaphore(most)
        self.probing = asyncio.Lock()
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            trust_env=proxies,
        )
        self._url = url
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stepgym-retriever", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether they are this process's own: a forked one has no use for its parent's sockets and threads."""
        return self._process == os.getpid()

    def run(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and wait for it, from another thread.

        Raises `RetrieverError` if the connections are, or in the meantime were, closed.
        """
        with self._lock:
            if self._closed:
                request.close()
                raise RetrieverError(f"{self._url}: the retriever has been closed")
            future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RetrieverError(f"{self._url}: the retriever has been closed") from None
        except BaseException:
            future.cancel()  # where it is this thread that was interrupted
            raise

    def close(self) -> None:
        """Cancel what runs, close the connections, and end the thread."""
        if not self.usable:
            return
        with self._lock:  # what was to run by now is known to the event loop, and nothing comes after it
            if self._closed:
                return
            self._closed = True

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.client.aclose()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(CONNECT_SECONDS)
        except concurrent.futures.TimeoutError:
            logger.warning("the connections to %s could not be closed in order", self._url)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONNECT_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
