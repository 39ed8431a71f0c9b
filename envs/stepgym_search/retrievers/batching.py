"""Searches of many askers, run together: one retriever answers a batch much faster than its queries one by one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgym_search.document import Document
from stepgym_search.retrievers.base import QueryRefused, Retriever, RetrieverError

logger = logging.getLogger(__name__)

CLOSED = "the search has been closed"
TRIES_ALONE = 4
"""How many queries of a failed batch are searched alone, in vain, before the others are given up too."""


@dataclass(eq=False)
class _Ask:
    """One query that somebody waits for."""

    query: str
    k: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Document]] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class BatchedSearch:
    """Gathers queries and lets a retriever answer them together.

    A query that comes while nothing runs is searched at once. Those that come while a search runs wait, and go together
    into the next one, so batches grow with the load and nobody waits for a timer. Equal queries of a batch are searched
    once. Askers may wait on any event loop of any thread; a cancelled one disturbs nobody else. Searches run in
    daemon threads: one that never returns keeps its askers waiting (the environment's watchdog is there for that), and
    the others if there is no further worker, but not the process from ending.

    Whose fault a failure is decides whom it reaches. A `RetrieverError` says that the retriever cannot search (its
    server is gone): every asker of the batch gets it, at once. `QueryRefused`, or any other exception, may be the
    fault of one query: the queries of the batch are then searched one by one, and each asker gets what its own came to
    (where the first four all fail it is the retriever after all). Any other exception reaches them as a
    `RetrieverError`.

    Args:
        retriever: What searches. It is not closed with this object, whose owner it need not be.
        max_batch: Most queries in one search.
        workers: Searches that run at once. More than one helps a retriever that waits for others or whose batches use
            one core, and is safe only with one that may be searched from several threads.
    """

    def __init__(self, retriever: Retriever, *, max_batch: int = 256, workers: int = 1) -> None:
        if max_batch < 1 or workers < 1:
            raise ValueError(f"max_batch and workers must be 1 or more, not {max_batch} and {workers}")
        self.retriever = retriever
        self.searches = 0
        """Searches that the retriever was asked for so far."""
        self.queries = 0
        """Queries that these held, equal ones of a batch counted once."""
        self._max_batch = max_batch
        self._workers = workers
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Ask] = deque()
        self._running: set[_Ask] = set()
        self._threads: list[threading.Thread] = []

    async def search(self, query: str, k: int) -> list[Document]:
        """The passages that fit a query best, at most `k` of them, best first.

        Raises `RetrieverError`; see the class.
        """
        return (await self.search_all([query], k))[0]

    async def search_all(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The passages for each of several queries, which need not end up in the same batch.

        Raises `RetrieverError` if one of them failed.
        """
        if k < 1:
            raise ValueError(f"k must be 1 or more, not {k}")
        loop = asyncio.get_running_loop()
        asks = [_Ask(query, k, loop) for query in queries]
        self._put(asks)
        try:
            return [await ask.future for ask in asks]
        finally:
            # Cancelled, or one of them failed: nobody waits for the others any more.
            for ask in asks:
                if not ask.future.cancel() and not ask.future.cancelled():
                    ask.future.exception()  # looked at, so that asyncio does not complain of it

    def close(self, patience: float = 10.0) -> bool:
        """Answer all who wait with a `RetrieverError`, and end the threads.

        Args:
            patience: Most seconds to wait for the searches that run.

        Returns:
            Whether none runs any more. Only then may the retriever be closed: a search may be reading its index.
        """
        if self._process != os.getpid():
            self._closed = True
            return True
        with self._changed:
            self._closed = True
            asks = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify_all()
        _settle({ask: RetrieverError(CLOSED) for ask in asks})
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _put(self, asks: Sequence[_Ask]) -> None:
        if self._process != os.getpid():
            self._begin()  # a forked process has its parent's queue, but not the threads that would empty it
        with self._changed:
            if self._closed:
                raise RetrieverError(CLOSED)
            self._waiting.extend(asks)
            self._changed.notify(len(asks))
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._work, name="stepgym-search", daemon=True)
                self._threads.append(thread)
                thread.start()

    # ---- in the threads -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            answers = self._answers(batch)
            with self._changed:
                self._running.difference_update(batch)
            _settle(answers)
            del batch, answers  # nothing is kept alive by a thread that waits

    def _next_batch(self) -> list[_Ask] | None:
        """What goes into the next search, in the order of asking; None when there will be none any more."""
        with self._changed:
            while True:
                batch: list[_Ask] = []
                while self._waiting and len(batch) < self._max_batch:
                    ask = self._waiting.popleft()
                    if not ask.future.cancelled():
                        batch.append(ask)
                if batch:
                    self._running.update(batch)
                    return batch
                if self._closed:
                    return None
                self._changed.wait()

    def _answers(self, batch: Sequence[_Ask]) -> dict[_Ask, list[Document] | RetrieverError]:
        """What each asker gets."""
        depth: dict[str, int] = {}
        for ask in batch:
            depth[ask.query] = max(ask.k, depth.get(ask.query, 0))
        found = self._found(list(depth), max(depth.values()))
        answers: dict[_Ask, list[Document] | RetrieverError] = {}
        for ask in batch:
            answer = found[ask.query]
            answers[ask] = answer[: ask.k] if isinstance(answer, list) else answer
        return answers

    def _found(self, queries: list[str], k: int) -> dict[str, list[Document] | RetrieverError]:
        with self._changed:
            self.searches += 1
            self.queries += len(queries)
        try:
            documents = self.retriever.search(queries, k)
            if len(documents) != len(queries):
                raise RetrieverError(f"the retriever gave {len(documents)} answers to {len(queries)} queries")
            return {query: list(answer) for query, answer in zip(queries, documents, strict=True)}
        except BaseException as error:  # a SystemExit too: it is this search that has failed, not the process
            if len(queries) == 1 or (isinstance(error, RetrieverError) and not isinstance(error, QueryRefused)):
                failed = _as_retriever_error(error)
                return dict.fromkeys(queries, failed)
            logger.debug("a batch of %d queries failed (%r); each is searched alone", len(queries), error)
        return self._found_alone(queries, k)

    def _found_alone(self, queries: list[str], k: int) -> dict[str, list[Document] | RetrieverError]:
        """Search the queries of a batch that failed one by one, unless it is the retriever that fails."""
        found: dict[str, list[Document] | RetrieverError] = {}
        for query in queries:
            answer = found[query] = self._found([query], k)[query]
            if isinstance(answer, list):
                continue
            in_vain = len(found) == TRIES_ALONE and not any(isinstance(a, list) for a in found.values())
            if in_vain or not isinstance(answer, _Broke | QueryRefused):
                return {**dict.fromkeys(queries, answer), **found}
        return found


class _Broke(RetrieverError):
    """The retriever raised something else than a `RetrieverError`: a fault in it, perhaps for one query only."""


def _as_retriever_error(error: BaseException) -> RetrieverError:
    if isinstance(error, RetrieverError):
        return error
    logger.debug("the retriever raised", exc_info=error)
    failed = _Broke(f"the retriever failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _settle(answers: dict[_Ask, list[Document] | RetrieverError]) -> None:
    """Hand each asker its answer, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, dict[_Ask, list[Document] | RetrieverError]] = {}
    for ask, answer in answers.items():
        by_loop.setdefault(ask.loop, {})[ask] = answer
    for loop, settled in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_results, settled)
        except RuntimeError:
            pass  # the loop has closed: nobody waits any more


def _set_results(answers: dict[_Ask, Any]) -> None:
    for ask, answer in answers.items():
        if ask.future.done():
            continue
        if isinstance(answer, RetrieverError):
            # One of its own for each, because whoever raises an exception writes its traceback into it.
            error = QueryRefused(str(answer)) if isinstance(answer, QueryRefused) else RetrieverError(str(answer))
            error.__cause__ = answer
            ask.future.set_exception(error)
        else:
            ask.future.set_result(answer)
