"""Places for episodes: a bound that several rollouts share, in which those that come first are served first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """So many episodes at once, over all rollouts that share this. For one event loop.

    A place that becomes free goes to the one that waits with the lowest `rank`; among equals to the one that has
    waited longest. So rollouts that overlap end in the order in which they were started, and a later one takes only
    the places that an earlier one has no more episodes for.

    Args:
        count: Episodes at once.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"places must be 1 or more, not {count}")
        self._free = count
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def take(self, rank: int = 0) -> AsyncIterator[None]:
        """Hold a place within; waits for one."""
        await self._acquire(rank)
        try:
            yield
        finally:
            # Not at once: whoever asks again right after this (a worker with its next episode) is considered too.
            asyncio.get_running_loop().call_soon(self._release)

    async def _acquire(self, rank: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given a place in the moment that it was cancelled
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
