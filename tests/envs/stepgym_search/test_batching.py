from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.document import Document
from stepgym_search.retrievers.base import QueryRefused, Retriever, RetrieverError
from stepgym_search.retrievers.batching import CLOSED, TRIES_ALONE, BatchedSearch


class Digits:
    """Finds `query/0`, `query/1`, … for any query; what `before` does comes first."""

    needs_corpus: ClassVar[bool] = False

    def __init__(self, before: Callable[[Sequence[str]], None] = lambda queries: None) -> None:
        self.before = before
        self.asked: list[tuple[list[str], int]] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        self.asked.append((list(queries), k))
        self.before(queries)
        return [[Document(f"{query}/{i}", query) for i in range(k)] for query in queries]

    def close(self) -> None:
        pass


class Gate:
    """Lets a search begin only when it is opened."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.opened = threading.Event()

    def __call__(self, queries: Sequence[str]) -> None:
        self.began.set()
        assert self.opened.wait(20)

    async def until_begun(self) -> None:
        while not self.began.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def batched() -> Iterator[Callable[..., BatchedSearch]]:
    made: list[BatchedSearch] = []

    def make(retriever: Retriever, **options: int) -> BatchedSearch:
        made.append(BatchedSearch(retriever, **options))
        return made[-1]

    yield make
    for search in made:
        search.close(0)


def ids(documents: Sequence[Document]) -> list[str]:
    return [document.id for document in documents]


def test_queries_that_wait_go_together_and_each_gets_its_own_k(batched: Callable[..., BatchedSearch]) -> None:
    gate = Gate()
    retriever = Digits(gate)
    search = batched(retriever)

    async def ask() -> None:
        first = asyncio.create_task(search.search("first", 2))
        await gate.until_begun()
        others = [asyncio.create_task(search.search(f"q{i}", 1 + i % 3)) for i in range(7)]
        await asyncio.sleep(0)
        gate.opened.set()
        assert ids(await first) == ["first/0", "first/1"]
        for i, task in enumerate(others):
            assert ids(await task) == [f"q{i}/{n}" for n in range(1 + i % 3)]

    asyncio.run(ask())
    assert retriever.asked == [(["first"], 2), ([f"q{i}" for i in range(7)], 3)]
    assert (search.searches, search.queries) == (2, 8)


def test_a_batch_has_a_bound_and_equal_queries_are_searched_once(batched: Callable[..., BatchedSearch]) -> None:
    gate = Gate()
    retriever = Digits(gate)
    search = batched(retriever, max_batch=4)

    async def ask() -> None:
        first = asyncio.create_task(search.search("first", 1))
        await gate.until_begun()
        rest = asyncio.create_task(search.search_all(["a", "a", "b", "a", "c", "d"], 1))
        await asyncio.sleep(0)
        gate.opened.set()
        await first
        assert [ids(found) for found in await rest] == [["a/0"], ["a/0"], ["b/0"], ["a/0"], ["c/0"], ["d/0"]]

    asyncio.run(ask())
    assert [queries for queries, _ in retriever.asked] == [["first"], ["a", "b"], ["c", "d"]]


@given(
    asks=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 4)), min_size=1, max_size=30),
    max_batch=st.integers(1, 5),
    workers=st.integers(1, 3),
)
def test_everybody_gets_exactly_what_they_asked_for(asks: list[tuple[str, int]], max_batch: int, workers: int) -> None:
    search = BatchedSearch(Digits(), max_batch=max_batch, workers=workers)

    async def ask() -> list[list[Document]]:
        return await asyncio.gather(*(search.search(query, k) for query, k in asks))

    for (query, k), found in zip(asks, asyncio.run(ask()), strict=True):
        assert ids(found) == [f"{query}/{i}" for i in range(k)]
    assert search.close()


def test_askers_on_several_event_loops_share_a_batch(batched: Callable[..., BatchedSearch]) -> None:
    gate = Gate()
    retriever = Digits(gate)
    search = batched(retriever)
    found: dict[int, list[str]] = {}

    def ask(i: int) -> None:
        found[i] = ids(asyncio.run(search.search(f"loop {i}", 1)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    threads[0].start()
    assert gate.began.wait(10)
    for thread in threads[1:]:
        thread.start()
    end = time.monotonic() + 10
    while len(search._waiting) < 4 and time.monotonic() < end:
        time.sleep(0.001)
    gate.opened.set()
    for thread in threads:
        thread.join(10)
    assert found == {i: [f"loop {i}/0"] for i in range(5)}
    assert sorted(retriever.asked[1][0]) == [f"loop {i}" for i in range(1, 5)]


def test_cancelled_askers_disturb_nobody(batched: Callable[..., BatchedSearch]) -> None:
    gate = Gate()
    retriever = Digits(gate)
    search = batched(retriever)

    async def ask() -> None:
        running = asyncio.create_task(search.search("running", 1))
        await gate.until_begun()
        waiting = [asyncio.create_task(search.search(f"q{i}", 1)) for i in range(4)]
        await asyncio.sleep(0)
        running.cancel()
        waiting[1].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0)
        gate.opened.set()
        results = await asyncio.gather(running, *waiting, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, True, False]
        assert ids(await waiting[0]) == ["q0/0"]
        assert ids(await waiting[3]) == ["q3/0"]

    asyncio.run(ask())
    assert [queries for queries, _ in retriever.asked] == [["running"], ["q0", "q3"]]


def test_an_event_loop_that_ended_does_not_keep_others_waiting(batched: Callable[..., BatchedSearch]) -> None:
    gate = Gate()
    search = batched(Digits(gate))

    async def leave() -> None:
        asyncio.create_task(search.search("left", 1))  # noqa: RUF006  # it is cancelled when the loop ends
        await gate.until_begun()

    asyncio.run(leave())
    gate.opened.set()
    assert ids(asyncio.run(search.search("stayed", 1))) == ["stayed/0"]


def fail_with(error: BaseException, *, bad: str) -> Callable[[Sequence[str]], None]:
    def before(queries: Sequence[str]) -> None:
        if any(bad in query for query in queries):
            raise error

    return before


def ask_all(search: BatchedSearch, queries: Sequence[str]) -> list[list[str] | BaseException]:
    """Ask so that all the queries are in one batch: behind a first one that waits for them."""
    retriever = search.retriever
    assert isinstance(retriever, Digits)
    gate, before = Gate(), retriever.before
    retriever.before = gate

    async def ask() -> list[list[str] | BaseException]:
        first = asyncio.create_task(search.search("first", 1))
        await gate.until_begun()
        tasks = [asyncio.create_task(search.search(query, 1)) for query in queries]
        await asyncio.sleep(0)
        retriever.before = before
        gate.opened.set()
        await first
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [ids(result) if isinstance(result, list) else result for result in results]

    return asyncio.run(ask())


def test_a_dead_retriever_fails_every_asker_at_once(batched: Callable[..., BatchedSearch]) -> None:
    retriever = Digits(fail_with(RetrieverError("the server is gone"), bad=""))
    results = ask_all(batched(retriever), ["a", "b", "c"])
    assert [type(result) for result in results] == [RetrieverError] * 3
    assert {str(result) for result in results} == {"the server is gone"}
    assert len({id(result) for result in results}) == 3
    assert len(retriever.asked) == 2  # the first query, and the batch; nothing was tried again


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("cannot parse"), RetrieverError("the retriever failed: ValueError: cannot parse")),
        (SystemExit(3), RetrieverError("the retriever failed: SystemExit: 3")),
        (QueryRefused("too long"), QueryRefused("too long")),
    ],
)
def test_one_bad_query_fails_alone(
    batched: Callable[..., BatchedSearch], error: BaseException, expected: RetrieverError
) -> None:
    results = ask_all(batched(Digits(fail_with(error, bad="bad"))), ["a", "bad", "c", "bad too"])
    assert results[0] == ["a/0"]
    assert results[2] == ["c/0"]
    for result in (results[1], results[3]):
        assert type(result) is type(expected)
        assert str(result) == str(expected)


def test_a_retriever_that_raises_whatever_it_is_asked_is_soon_given_up(batched: Callable[..., BatchedSearch]) -> None:
    retriever = Digits(fail_with(OSError("disk"), bad=""))
    results = ask_all(batched(retriever), [f"q{i}" for i in range(50)])
    assert {str(result) for result in results} == {"the retriever failed: OSError: disk"}
    assert len(retriever.asked) == 2 + TRIES_ALONE


def test_a_server_that_goes_while_queries_are_searched_alone_fails_the_rest(
    batched: Callable[..., BatchedSearch],
) -> None:
    def before(queries: Sequence[str]) -> None:
        if len(queries) > 1:
            raise ValueError("some query")
        if queries == ["b"]:
            raise RetrieverError("gone")

    results = ask_all(batched(retriever := Digits(before)), ["a", "b", "c", "d"])
    assert results[0] == ["a/0"]
    assert [str(result) for result in results[1:]] == ["gone"] * 3
    assert [queries for queries, _ in retriever.asked[2:]] == [["a"], ["b"]]


def test_too_few_answers_are_an_error_and_not_somebody_elses_documents(batched: Callable[..., BatchedSearch]) -> None:
    class Forgetful(Digits):
        def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
            return super().search(queries, k)[: max(1, len(queries) - 1)]

    results = ask_all(batched(Forgetful()), ["a", "b", "c"])
    assert {str(result) for result in results} == {"the retriever gave 2 answers to 3 queries"}


def test_searches_run_side_by_side_with_more_workers(batched: Callable[..., BatchedSearch]) -> None:
    together = threading.Barrier(2)

    def meet(queries: Sequence[str]) -> None:
        together.wait(10)

    search = batched(Digits(meet), workers=2, max_batch=1)

    async def ask() -> list[list[Document]]:
        return await asyncio.gather(search.search("a", 1), search.search("b", 1))

    assert [ids(found) for found in asyncio.run(ask())] == [["a/0"], ["b/0"]]


def test_closing_answers_all_who_wait_even_behind_a_search_that_hangs(batched: Callable[..., BatchedSearch]) -> None:
    gate = Gate()
    digits = Digits(gate)
    search = batched(digits)

    async def ask() -> None:
        running = asyncio.create_task(search.search("running", 1))
        await gate.until_begun()
        waiting = asyncio.create_task(search.search("waiting", 1))
        await asyncio.sleep(0)
        assert not await asyncio.to_thread(search.close, 0.0)  # a search still runs, so the index is in use
        for task in (running, waiting):
            with pytest.raises(RetrieverError, match=CLOSED):
                await asyncio.wait_for(task, 10)
        with pytest.raises(RetrieverError, match=CLOSED):
            await search.search("late", 1)

    asyncio.run(ask())
    gate.opened.set()
    assert search.close()
    assert not [thread for thread in search._threads if thread.is_alive()]
    assert digits.asked == [(["running"], 1)]  # what nobody waits for any more was not searched


def test_nonsense_is_refused() -> None:
    for options in ({"max_batch": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            BatchedSearch(Digits(), **options)
    search = BatchedSearch(Digits())
    with pytest.raises(ValueError, match="k must be 1 or more, not 0"):
        asyncio.run(search.search("a", 0))
    assert asyncio.run(search.search_all([], 1)) == []
    assert search.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_searches_with_threads_of_its_own(batched: Callable[..., BatchedSearch]) -> None:
    search = batched(Digits())
    assert ids(asyncio.run(search.search("parent", 1))) == ["parent/0"]
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        sender.send(ids(asyncio.run(search.search("child", 1))))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiver.poll(20)
    assert receiver.recv() == ["child/0"]
    process.join(10)
    assert process.exitcode == 0
    assert ids(asyncio.run(search.search("parent again", 1))) == ["parent again/0"]
