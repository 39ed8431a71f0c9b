from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgym_search.document import Document
from stepgym_search.retrievers import open_retriever
from stepgym_search.retrievers.base import QueryRefused, Retriever, RetrieverError
from stepgym_search.retrievers.remote import HTTPRetriever
from stepgym_search.server.app import create_app

from stepgym.errors import EnvError, UserError

GOOD = {"result": [[{"document": {"id": "7", "contents": "Title\nText"}, "score": 0.5}]]}


@pytest.fixture
def connect() -> Iterator[Callable[..., HTTPRetriever]]:
    made: list[HTTPRetriever] = []

    def make(url: str, **fields: Any) -> HTTPRetriever:
        made.append(HTTPRetriever(url=url, **fields))
        return made[-1]

    yield make
    for retriever in made:
        retriever.close()


@pytest.fixture
def replies(raw_server: Any, retrieval_servers: Any) -> Callable[..., Any]:
    """A server that sends these replies, each bytes or `(status, content, headers)`."""

    def start(*given: Any) -> Any:
        made = [
            one if isinstance(one, bytes) else retrieval_servers.answer(one[0], one[1], **(one[2:] or ({},))[0])
            for one in given
        ]
        return raw_server(retrieval_servers.answers(*made))

    return start


def failure(retriever: Retriever, query: str = "who") -> RetrieverError:
    with pytest.raises(RetrieverError) as caught:
        retriever.search([query], 1)
    assert isinstance(caught.value, EnvError)  # so that an episode ends in env_error
    assert "\n" not in str(caught.value)
    return caught.value


# ---- what goes well -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["auto", "queries", "query"])
@pytest.mark.parametrize("return_scores", [True, False])
def test_documents_come_from_a_real_server_in_every_form(
    serve_app: Any, echo: Any, connect: Any, form: Any, return_scores: bool
) -> None:
    retriever = connect(serve_app(create_app(echo)).url, form=form, return_scores=return_scores, max_batch=3)
    queries = [f"query {i}" for i in range(10)]
    found = retriever.search(queries, 2)
    assert found == [
        [Document(f"{i}", f'"{query}"\nText {i}.', 1.0 / (i + 1) if return_scores else 0.0) for i in range(2)]
        for query in queries
    ]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(queries=st.lists(st.text(st.characters(), max_size=20), max_size=5), k=st.integers(1, 3))
def test_every_text_survives_the_way(
    serve_app: Any, shared: dict[str, Any], echo: Any, queries: list[str], k: int
) -> None:
    if not shared:
        shared["retriever"] = HTTPRetriever(url=serve_app(create_app(echo)).url)
    found = shared["retriever"].search(queries, k)
    for query, documents in zip(queries, found, strict=True):
        whole = query.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        wanted = [f'"{whole}"\nText {i}.' for i in range(k)] if query.strip() else []
        assert [document.contents for document in documents] == wanted


@pytest.fixture
def shared() -> Iterator[dict[str, Any]]:
    kept: dict[str, Any] = {}
    yield kept
    kept["retriever"].close()


def test_auto_finds_out_once_that_a_server_takes_one_query(
    raw_server: Any, retrieval_servers: Any, connect: Any
) -> None:
    answer = retrieval_servers.answer

    def skyrl(connection: socket.socket, request: Any) -> None:
        if "query" not in request:
            connection.sendall(answer(422, {"detail": [{"loc": ["body", "query"], "msg": "Field required"}]}))
        else:
            document = {"id": "1", "contents": request["query"]}
            connection.sendall(answer(200, {"result": [[{"document": document, "score": 1.5}]]}))

    server = raw_server(skyrl)
    retriever = connect(server.url)
    for _ in range(2):
        found = retriever.search(["a", "b", "c"], 3)
        assert [[document.contents for document in documents] for documents in found] == [["a"], ["b"], ["c"]]
    refused = [request for request in server.requests if "queries" in request]
    assert refused == [{"queries": ["a", "b", "c"], "topk": 3, "return_scores": True}]
    assert {"query": "a", "topk": 3, "return_scores": True} in server.requests


def test_queries_are_sent_in_batches_and_batches_side_by_side(serve_app: Any, echo: Any, connect: Any) -> None:
    retriever = connect(serve_app(create_app(echo)).url, form="queries", max_batch=4, connections=2)
    found = retriever.search([f"q{i}" for i in range(11)], 1)
    assert [documents[0].title for documents in found] == [f'"q{i}"' for i in range(11)]
    # Two requests that are under way together may be searched in one batch by the server.
    assert sorted(query for batch in echo.batches for query in batch) == sorted(f"q{i}" for i in range(11))
    assert max(len(batch) for batch in echo.batches) <= 8


def test_a_query_without_a_word_finds_nothing_and_is_not_sent(replies: Any, connect: Any) -> None:
    server = replies((200, GOOD))
    retriever = connect(server.url)
    assert retriever.search(["", "  \n"], 3) == [[], []]
    assert retriever.search([], 3) == []
    assert server.requests == []
    assert retriever.search(["", "who"], 3) == [[], [Document("7", "Title\nText", 0.5)]]


def test_documents_are_read_in_the_shapes_seen_in_the_wild(replies: Any, connect: Any) -> None:
    documents = [
        {"document": {"id": 7, "contents": "A\nB", "url": "x"}, "score": 2},
        {"document": {"title": "A\n title", "text": "B"}, "score": None},
        {"id": "9", "text": "no title"},
        {"contents": "C\ud83d", "score": 1.25},
    ]
    retriever = connect(replies((200, {"result": [documents], "other": 1})).url)
    assert retriever.search(["q"], 9) == [
        [
            Document("7", "A\nB", 2.0),
            Document("", "A title\nB", 0.0),
            Document("9", "no title", 0.0),
            Document("", "C\ufffd", 1.25),
        ]
    ]
    assert len(retriever.search(["q"], 2)[0]) == 2  # no more than asked for, whatever the server sends


def test_it_is_opened_by_its_name_and_speaks_with_the_headers_it_is_given(
    replies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRIEVAL_KEY", "secret")
    server = replies((200, GOOD))

    def no_corpus() -> Any:
        raise AssertionError("a server has its own corpus")

    config = {"kind": "http", "url": server.url, "headers": {"Authorization": "Bearer ${RETRIEVAL_KEY}"}}
    retriever = open_retriever(config, no_corpus)
    assert isinstance(retriever, Retriever)
    assert retriever.search(["who"], 3) == [[Document("7", "Title\nText", 0.5)]]
    assert server.headers[0]["authorization"] == "Bearer secret"
    retriever.close()


def test_no_proxy_leads_to_this_machine(replies: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = socket.create_server(("127.0.0.1", 0))
    proxy = f"http://127.0.0.1:{dead.getsockname()[1]}"
    dead.close()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert connect(replies((200, GOOD)).url).search(["who"], 1) == [[Document("7", "Title\nText", 0.5)]]
    remote = connect("http://retrieval.invalid:8000", retries=0)
    assert "cannot be reached" in str(failure(remote))  # through the proxy, which is dead


# ---- what passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passing", [(429, "busy"), (502, "x"), (503, {"detail": "starting"}), (504, "x"), b""])
def test_a_failure_in_passing_is_tried_again(replies: Any, connect: Any, passing: Any) -> None:
    server = replies(passing, passing, (200, GOOD))
    assert connect(server.url).search(["who"], 1) == [[Document("7", "Title\nText", 0.5)]]
    assert len(server.requests) == 3


def test_tries_are_bounded_and_the_last_failure_is_told(replies: Any, connect: Any) -> None:
    server = replies((503, {"detail": "the index is being\nbuilt"}, {"retry_after": "0"}))
    error = failure(connect(server.url, retries=2))
    assert str(error) == f"{server.url}/retrieve answered with HTTP 503: the index is being built"
    assert len(server.requests) == 3


@pytest.mark.parametrize("asked", ["0", "nan", "-5", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_server_that_names_an_odd_pause_is_tried_again_all_the_same(replies: Any, connect: Any, asked: str) -> None:
    server = replies((503, "x", {"retry_after": asked}), (200, GOOD))
    assert len(connect(server.url).search(["who"], 1)[0]) == 1


def test_a_pause_longer_than_the_time_limit_ends_with_it(replies: Any, connect: Any) -> None:
    server = replies((503, "x", {"retry_after": "1e9"}))
    error = failure(connect(server.url, timeout=0.3))
    told = f"{server.url}/retrieve answered with HTTP 503: x"
    assert str(error) == f"{server.url}/retrieve did not answer within 0.3 s; the last try before: {told}"
    assert len(server.requests) == 1


def test_a_server_that_asks_for_a_long_pause_is_tried_again_sooner(
    replies: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepgym_search.retrievers.remote.LONGEST_WAIT", 0.01)
    server = replies((503, "x", {"retry_after": "3600"}), (200, GOOD))
    assert len(connect(server.url, timeout=60.0).search(["who"], 1)[0]) == 1


def test_waiting_for_a_free_connection_costs_a_request_none_of_its_time(
    raw_server: Any, retrieval_servers: Any, connect: Any
) -> None:
    def behave(connection: socket.socket, request: Any) -> None:
        time.sleep(0.5)
        connection.sendall(retrieval_servers.answer(200, GOOD))

    retriever = connect(raw_server(behave).url, form="query", connections=1, timeout=2.0, retries=0)
    assert len(retriever.search([f"q{i}" for i in range(6)], 1)) == 6  # 3 s in all


def test_a_failure_lets_go_of_the_other_requests_of_the_search(
    raw_server: Any, retrieval_servers: Any, connect: Any
) -> None:
    arrived, let_go = threading.Event(), threading.Event()

    def behave(connection: socket.socket, request: Any) -> None:
        if request["query"] == "bad":
            assert arrived.wait(20)
            connection.sendall(retrieval_servers.answer(500, "no"))
            return
        arrived.set()
        connection.settimeout(20)
        if connection.recv(1) == b"":  # the client hung up
            let_go.set()

    retriever = connect(raw_server(behave).url, form="query", timeout=60.0)
    with pytest.raises(RetrieverError, match="HTTP 500"):
        retriever.search(["hangs", "bad"], 1)
    assert let_go.wait(20)


def test_a_server_that_comes_back_is_found_again_by_the_same_retriever(serve_app: Any, echo: Any, connect: Any) -> None:
    server = serve_app(create_app(echo))
    retriever = connect(server.url, retries=0)
    assert len(retriever.search(["who"], 1)[0]) == 1
    server.stop()
    assert "cannot be reached" in str(failure(retriever))
    port = int(server.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as again:
        answered = threading.Thread(target=answer_one, args=(again,))
        answered.start()
        assert len(retriever.search(["who"], 1)[0]) == 1
        answered.join(10)


def answer_one(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        body = b'{"result": [[{"id": "1", "contents": "A"}]]}'
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_a_dead_server_is_infrastructures_fault(connect: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    error = failure(connect(url, retries=1))
    assert str(error).startswith(f"{url}/retrieve cannot be reached: ConnectError")


def silent(connection: socket.socket, request: Any) -> None:
    connection.settimeout(30)
    connection.recv(1)  # until the client leaves


def drip(text: bytes) -> Callable[[socket.socket, Any], None]:
    def behave(connection: socket.socket, request: Any) -> None:
        for _ in range(600):
            connection.sendall(text)
            time.sleep(0.05)

    return behave


def drip_body(connection: socket.socket, request: Any) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    drip(b"[")(connection, request)


@pytest.mark.parametrize(
    "behave",
    [silent, drip_body, drip(b"H"), drip(b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["silent", "body", "line", "100"],
)
@pytest.mark.parametrize("form", ["queries", "query"])
def test_no_server_keeps_a_search_longer_than_its_time_limit(
    raw_server: Any, connect: Any, behave: Any, form: Any
) -> None:
    retriever = connect(raw_server(behave).url, timeout=0.4, connections=2, form=form)
    started = time.monotonic()
    with pytest.raises(RetrieverError):
        retriever.search([f"q{i}" for i in range(100)], 1)
    assert time.monotonic() - started < 15  # not 50 × 0.4 s one after the other, and not for ever


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"<html>hello</html>", "no JSON"),
        (b"\xff\xfe\xff", "no JSON"),
        (b"", "no JSON"),
        (b"[" * 200_000, "recursion"),
        ([1], "no list 'result' in it"),
        ({"results": []}, "no list 'result' in it"),
        ({"result": []}, "0 results for 1 query"),
        ({"result": [[], []]}, "2 results for 1 query"),
        ({"result": [{"id": "1"}]}, "result 0 is no list of documents"),
        ({"result": [["text"]]}, "result 0, document 0, is no object"),
        ({"result": [[{"document": "text", "score": 1}]]}, "result 0, document 0, is no object"),
        ({"result": [[{"id": "1"}]]}, "result 0, document 0, has no text 'contents'"),
        ({"result": [[{"contents": 7}]]}, "result 0, document 0, has no text 'contents'"),
        (b'{"result": [[{"document": {"contents": "a"}, "score": NaN}]]}', "has a score that is no finite number"),
        (b'{"result": [[{"document": {"contents": "a"}, "score": 1' + b"0" * 400 + b"}]]}", "no finite number"),
        ({"result": [[{"document": {"contents": "a"}, "score": "1"}]]}, "has a score that is no finite number"),
        ({"result": [[{"document": {"contents": "a"}, "score": True}]]}, "has a score that is no finite number"),
    ],
)
def test_an_answer_of_another_shape_is_an_error_in_one_line(
    replies: Any, connect: Any, content: Any, told: str
) -> None:
    server = replies((200, content))
    error = str(failure(connect(server.url)))
    assert error.startswith(f"{server.url}/retrieve answered with something else than documents: ")
    assert told in error
    assert len(server.requests) == 1


def test_an_answer_that_never_ends_is_refused_while_it_is_read(
    raw_server: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepgym_search.retrievers.remote.MAX_ANSWER_BYTES", 2**20)

    def endless(connection: socket.socket, request: Any) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" " * 65536)

    server = raw_server(endless)
    assert str(failure(connect(server.url))) == f"{server.url}/retrieve answered with more than 1 MiB"
    assert len(server.requests) == 1


def test_an_encoding_that_cannot_be_undone_is_an_error(replies: Any, connect: Any) -> None:
    error = failure(connect(replies((200, b"not gzip at all", {"content_encoding": "gzip"})).url))
    assert "cannot be read" in str(error)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_is_told_from_a_dead_server(replies: Any, connect: Any, status: int) -> None:
    server = replies((status, {"detail": "query 0 is too long"}))
    error = failure(connect(server.url))
    assert type(error) is QueryRefused
    assert str(error) == f"{server.url}/retrieve answered with HTTP {status}: query 0 is too long"
    assert [list(request) for request in server.requests] == [
        ["queries", "topk", "return_scores"],
        ["query", "topk", "return_scores"],
    ]


@pytest.mark.parametrize("status", [301, 401, 404, 500])
def test_other_statuses_fail_at_once(replies: Any, connect: Any, status: int) -> None:
    server = replies((status, b"<h1>No</h1>"))
    error = failure(connect(server.url))
    assert type(error) is RetrieverError
    assert str(error) == f"{server.url}/retrieve answered with HTTP {status}: <h1>No</h1>"
    assert len(server.requests) == 1


def test_a_server_that_dies_while_searches_run_fails_them_and_hangs_none(
    serve_app: Any, echo: Any, connect: Any
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait(queries: Sequence[str]) -> None:
        began.set()
        go_on.wait(20)

    echo.before = wait
    server = serve_app(create_app(echo))
    retriever = connect(server.url, retries=1, timeout=20.0)
    failures: list[RetrieverError] = []
    threads = [
        threading.Thread(target=lambda i=i: failures.append(failure(retriever, f"q{i}")), daemon=True) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    server.server.force_exit = True  # the connections are cut, not served to their end
    server.server.should_exit = True
    for thread in threads:
        thread.join(20)
    go_on.set()
    assert len(failures) == 4


# ---- the end --------------------------------------------------------------------------------------------------------


def test_closing_ends_searches_that_run_and_refuses_later_ones(raw_server: Any, connect: Any) -> None:
    began = threading.Event()

    def wait(connection: socket.socket, request: Any) -> None:
        began.set()
        silent(connection, request)

    retriever = connect(raw_server(wait).url)
    failures: list[RetrieverError] = []
    thread = threading.Thread(target=lambda: failures.append(failure(retriever)))
    thread.start()
    assert began.wait(10)
    retriever.close()
    thread.join(10)
    assert [str(error).endswith("the retriever has been closed") for error in failures] == [True]
    assert str(failure(retriever)).endswith("the retriever has been closed")
    retriever.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_connections_of_its_own(serve_app: Any, echo: Any, connect: Any) -> None:
    retriever = connect(serve_app(create_app(echo)).url)
    assert len(retriever.search(["parent"], 1)[0]) == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, retriever.search(["child"], 1)[0][0].title.encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b'"child"'
    os.close(reader)
    os.waitpid(child, 0)
    assert retriever.search(["again"], 1)[0][0].title == '"again"'


# ---- wrong fields ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"url": "localhost:8000"}, "url must look like http://host:8000/retrieve"),
        ({"url": "http://"}, "url must look like"),
        ({"url": "http://host:port/"}, "url must look like"),
        ({"url": "ftp://host/"}, "url must look like"),
        ({"timeout": 0}, "timeout must be above 0, not 0"),
        ({"connections": 0}, "connections must be above 0, not 0"),
        ({"max_batch": 0}, "max_batch must be above 0, not 0"),
        ({"retries": -1}, "retries must be 0 or more, not -1"),
        ({"headers": {"x-key": "${NOT_SET_ANYWHERE}"}}, "the environment variable NOT_SET_ANYWHERE, which is not set"),
        ({"headers": {"x-key": "a $ b"}}, r"write \$\$ for a dollar sign"),
        ({"headers": {"x-key": "a\nb"}}, "headers.x-key must be one line of ASCII"),
        ({"form": "both"}, "form"),
        ({"uri": "http://host"}, "did you mean 'url'"),
    ],
)
def test_wrong_fields_are_one_line(fields: dict[str, Any], told: str) -> None:
    config = {"kind": "http", "url": "http://host:8000", **fields}
    with pytest.raises(UserError, match=told) as caught:
        open_retriever(config, lambda: pytest.fail("no corpus is opened"))
    assert str(caught.value).startswith("search: retriever")


def test_a_password_in_the_url_is_not_told(connect: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    error = failure(connect(f"http://me:secret@127.0.0.1:{port}/find", retries=0))
    assert str(error).startswith(f"http://127.0.0.1:{port}/find cannot be reached")
