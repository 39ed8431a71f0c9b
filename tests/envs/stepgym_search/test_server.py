from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgym_search.corpus import open_corpus
from stepgym_search.document import Document
from stepgym_search.retrievers import open_retriever
from stepgym_search.retrievers.base import QueryRefused, RetrieverError
from stepgym_search.retrievers.remote import HTTPRetriever
from stepgym_search.server.app import create_app


@pytest.fixture
def post(serve_app: Any, echo: Any) -> Callable[..., httpx.Response]:
    """`post(body, **limits)` sends a body, JSON or bytes, to an application around `echo` with these limits."""
    urls: dict[str, str] = {}

    def send(body: Any, **limits: Any) -> httpx.Response:
        key = repr(sorted(limits.items()))
        if key not in urls:
            urls[key] = serve_app(create_app(echo, **limits)).url
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{urls[key]}/retrieve", content=content, trust_env=False, timeout=30)

    return send


def detail(response: httpx.Response, status: int) -> str:
    assert response.status_code == status
    assert list(response.json()) == ["detail"]
    text = response.json()["detail"]
    assert isinstance(text, str)
    assert "\n" not in text
    return text


# ---- what clients of the original and of SkyRL's send ----------------------------------------------------------------


def test_the_original_form_answers_pairs_of_document_and_score(post: Any) -> None:
    answer = post({"queries": ["a", "b"], "topk": 2, "return_scores": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "result": [
            [
                {"document": {"id": "0", "contents": f'"{query}"\nText 0.'}, "score": 1.0},
                {"document": {"id": "1", "contents": f'"{query}"\nText 1.'}, "score": 0.5},
            ]
            for query in ("a", "b")
        ]
    }


def test_without_scores_documents_come_alone_and_three_of_them(post: Any) -> None:
    for extra in ({}, {"topk": None}, {"return_scores": False}, {"model": "a field that the original would ignore"}):
        answer = post({"queries": ["a"], **extra})
        assert answer.json() == {"result": [[{"id": f"{i}", "contents": f'"a"\nText {i}.'} for i in range(3)]]}


def test_skyrls_form_has_one_query(post: Any) -> None:
    answer = post({"query": "a", "topk": 1, "return_scores": True})
    assert answer.json() == {"result": [[{"document": {"id": "0", "contents": '"a"\nText 0.'}, "score": 1.0}]]}
    assert post({"query": "a", "topk": 1}).json() == {"result": [[{"id": "0", "contents": '"a"\nText 0.'}]]}


def test_no_queries_have_no_results(post: Any) -> None:
    assert post({"queries": []}).json() == {"result": []}


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"queries": ["\\ud83d"]}', "JSON"),
        ([], "expected an object"),
        ({}, "send either 'queries', a list of texts, or 'query', one text"),
        ({"queries": ["a"], "query": "a"}, "send either 'queries'"),
        ({"queries": "a"}, "queries: expected a list, got 'a'"),
        ({"queries": ["a", 7]}, "queries[1]: expected a string, got 7"),
        ({"queries": [None]}, "queries[0]: expected a string, got None"),
        ({"query": ["a"]}, "query: expected a string, got ['a']"),
        ({"queries": ["a"], "topk": "3"}, "topk: expected an integer, got '3'"),
        ({"queries": ["a"], "topk": True}, "topk: expected an integer, got True"),
        ({"queries": ["a"], "topk": 2.5}, "topk: expected an integer, got 2.5"),
        ({"queries": ["a"], "topk": 0}, "topk is 0, but must be from 1 to 5"),
        ({"queries": ["a"], "topk": 6}, "topk is 6, but must be from 1 to 5"),
        ({"queries": ["a"], "return_scores": "yes"}, "return_scores: expected a boolean, got 'yes'"),
        ({"queries": ["a"] * 4}, "there are 4 queries, but a request may have 3"),
        ({"queries": ["a", "b" * 11]}, "query 1 has 11 characters, but may have 10"),
    ],
)
def test_a_wrong_request_is_told_in_one_sentence(post: Any, echo: Any, body: Any, told: str) -> None:
    assert told in detail(post(body, max_queries=3, max_query_chars=10, max_topk=5), 422)
    assert echo.batches == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["queries", "query", "topk", "return_scores", "x"]), inner, max_size=4
                )
            ),
            max_leaves=6,
        ),
    )
)
def test_no_request_breaks_the_server(post: Any, body: Any) -> None:
    answer = post(body)
    assert answer.status_code in (200, 422)
    if answer.status_code == 422:
        detail(answer, 422)


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(serve_app: Any, echo: Any) -> None:
    port = port_of(serve_app(create_app(echo, max_body_mb=1)).url)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 1048577\r\n\r\n")
        answer = b""
        while received := connection.recv(65536):  # until the server hangs up: what follows would be read as a request
            answer += received
        assert answer.startswith(b"HTTP/1.1 413")


def test_a_body_without_an_end_is_refused_while_it_is_read(serve_app: Any, echo: Any) -> None:
    port = port_of(serve_app(create_app(echo, max_body_mb=1)).url)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        sent, answer = 0, b""
        connection.settimeout(0.01)
        try:
            while not answer and sent < 64 * 2**20:
                connection.settimeout(20)
                connection.sendall(chunk)
                sent += 65536
                connection.settimeout(0.001)
                try:
                    answer = connection.recv(65536)
                except TimeoutError:
                    pass
        except (ConnectionResetError, BrokenPipeError):
            answer = answer or b"HTTP/1.1 413"  # it hung up while we were sending
        assert answer.startswith(b"HTTP/1.1 413")
        assert sent < 16 * 2**20
    assert echo.batches == []


def test_a_client_that_leaves_in_the_middle_of_a_request_disturbs_nobody(
    serve_app: Any, echo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepgym_search.server.app.BODY_SECONDS", 0.3)
    url = serve_app(create_app(echo)).url
    head = b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=20) as connection:
        connection.sendall(head)
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=20) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    assert httpx.post(f"{url}/retrieve", json={"query": "a"}, trust_env=False).status_code == 200


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


# ---- when the search fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (RetrieverError("the index\nis gone"), 503, "the search failed: the index is gone"),
        (KeyError("x"), 503, "the search failed: the retriever failed: KeyError: 'x'"),
        (QueryRefused("query 0 is too long"), 422, "query 0 is too long"),
    ],
)
def test_a_failing_retriever_is_told_without_a_traceback(
    post: Any, echo: Any, error: Exception, status: int, told: str
) -> None:
    echo.fail = error
    assert detail(post({"query": "a"}), status) == told
    echo.fail = None
    assert post({"query": "a"}).status_code == 200


def test_a_score_that_is_no_number_is_a_failure_and_not_bad_json(post: Any, echo: Any) -> None:
    echo.search = lambda queries, k: [[Document("1", "a", float("nan"))] for _ in queries]
    assert "a score that is no finite number" in detail(post({"query": "a", "return_scores": True}), 503)


# ---- many clients ----------------------------------------------------------------------------------------------------


def test_the_queries_of_concurrent_requests_are_searched_together(serve_app: Any, echo: Any) -> None:
    opened = threading.Event()

    def wait(queries: Sequence[str]) -> None:
        assert opened.wait(20)

    echo.before = wait
    server = serve_app(create_app(echo, max_batch=64))
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client, ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(client.post, "/retrieve", json={"query": f"q{i}", "topk": 1}) for i in range(24)]
        asking = threading.Timer(0.3, opened.set)
        asking.start()
        for i, answer in enumerate(answers):
            assert answer.result(30).json()["result"][0][0]["contents"] == f'"q{i}"\nText 0.'
    assert sum(len(batch) for batch in echo.batches) == 24
    assert len(echo.batches) <= 6


def test_health_says_what_is_served(serve_app: Any, echo: Any) -> None:
    about = {"retriever": "bm25s", "documents": 3, "digest": "abc"}
    url = serve_app(create_app(echo, about)).url
    assert httpx.get(f"{url}/health", trust_env=False).json() == {
        "status": "ok",
        "retriever": "bm25s",
        "documents": 3,
        "digest": "abc",
        "searches": 0,
        "queries": 0,
    }
    httpx.post(f"{url}/retrieve", json={"queries": ["a", "b"]}, trust_env=False)
    assert httpx.get(f"{url}/health", trust_env=False).json()["queries"] == 2


def test_the_interface_is_described(serve_app: Any, echo: Any) -> None:
    url = serve_app(create_app(echo)).url
    schema = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    body = schema["paths"]["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"queries", "query", "topk", "return_scores"}


# ---- with a real index -----------------------------------------------------------------------------------------------


def test_a_search_over_http_finds_what_the_index_behind_it_finds(serve_app: Any, passages: Path) -> None:
    corpus = open_corpus(passages)
    here = open_retriever("bm25s", lambda: corpus)
    there = HTTPRetriever(url=serve_app(create_app(here)).url, max_batch=2)
    queries = [
        "poet born in Narn",
        "harbour mayor",
        "café",
        "都市",
        "",
        "nothing of the kind",
        "</information> thieves",
    ]
    found = there.search(queries, 2)
    assert found == here.search(queries, 2)
    assert [[document.id for document in documents[:1]] for documents in found[:2]] == [["velor"], ["ost"]]
    there.close()
    here.close()
    corpus.close()


def test_a_server_may_stand_before_another_one(serve_app: Any, echo: Any) -> None:
    inner = HTTPRetriever(url=serve_app(create_app(echo, max_query_chars=5)).url, form="query", retries=0)
    outer = HTTPRetriever(url=serve_app(create_app(inner)).url)
    assert [documents[0].title for documents in outer.search(["a", "b"], 1)] == ['"a"', '"b"']
    with pytest.raises(QueryRefused, match="query 0 has 6 characters, but may have 5"):
        outer.search(["abcdef"], 1)
    inner.close()
    with pytest.raises(RetrieverError, match=r"HTTP 503: the search failed: .* has been closed"):
        HTTPRetriever(url=outer.url, retries=0).search(["a"], 1)
    outer.close()


def test_a_server_that_stops_answers_those_who_wait(serve_app: Any, echo: Any) -> None:
    opened = threading.Event()

    def wait(queries: Sequence[str]) -> None:
        assert opened.wait(20)

    echo.before = wait
    server = serve_app(create_app(echo))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.url}/retrieve", json={"query": "a"}, trust_env=False, timeout=30)
        end = time.monotonic() + 10
        while not echo.batches and time.monotonic() < end:
            time.sleep(0.005)
        server.server.should_exit = True
        threading.Timer(0.2, opened.set).start()
        assert answer.result(30).status_code == 200
    server.stop()
    assert not server.thread.is_alive()


def test_a_server_that_stops_waits_for_no_half_of_a_request(
    serve_app: Any, echo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve_app(create_app(echo))
    with socket.create_connection(("127.0.0.1", port_of(server.url)), timeout=20) as connection:
        connection.sendall(b'POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"query": ')
        time.sleep(0.1)
        server.stop()
        answer = connection.recv(65536)
    assert not server.thread.is_alive()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the server ends" in answer
    assert "Traceback" not in caplog.text
