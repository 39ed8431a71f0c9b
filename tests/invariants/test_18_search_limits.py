"""Promise 18: What an agent sends (SQL, shell, files, HTTP) cannot leave its sandbox, and every such action has a
time, output and memory limit. Here: searches, by index and by HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.env import SearchEnv

from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.errors import EnvError

TASK = Task("t", "?", "gold")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPGYM_HOME", str(tmp_path_factory.mktemp("home")))
        yield
        close_shared(SearchEnv)


@pytest.fixture(scope="module")
def great(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus whose passages are far too long to be shown."""
    path = tmp_path_factory.mktemp("great") / "passages.jsonl"
    lines = [json.dumps({"id": str(n), "contents": f"Title {n}\n{'word é ' * 150_000}"}) for n in range(5)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def search(query: str, **config: Any) -> tuple[str, dict[str, Any]]:
    env = SearchEnv(**config)
    env.reset(options={"task": TASK})
    (message,), *_, info = env.step(f"<search>{query}</search>")
    return message["content"], info


@pytest.mark.parametrize("observation_format", ["search-r1", "skyrl", "brief"])
def test_what_a_search_shows_is_bounded(great: str, observation_format: str) -> None:
    for topk, most in ((1, 100), (5, 100), (3, 8000)):
        config = {"topk": topk, "max_document_chars": most, "observation_format": observation_format}
        text, info = search("word", corpus=great, **config)
        assert info["metrics"]["documents"] == topk
        widest = 6 if observation_format == "skyrl" else 1  # \\u00e9, in its JSON
        assert len(text) <= topk * (most + 40) * widest + 60
        assert "…" in text or "\\u2026" in text


@settings(max_examples=30)
@given(query=st.text(alphabet=st.characters(exclude_characters="<>"), min_size=101, max_size=400))
def test_a_query_over_the_limit_is_never_searched_for(great: str, query: str) -> None:
    text, info = search(query + "x" * 101, corpus=great, max_query_chars=100)
    assert "may have 100" in text
    assert "Title" not in text
    assert info["action_error"]


class Server:
    """Takes one request after another, and drips its answer for ever."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.bodies: list[bytes] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.drip, args=(connection,), daemon=True).start()

    def drip(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data or not data.rstrip().endswith(b"}"):
                data += connection.recv(65536)
            self.bodies.append(data.partition(b"\r\n\r\n")[2])
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)
            except OSError:
                return


def test_a_search_by_http_ends_in_time_and_its_query_stays_a_text() -> None:
    server = Server()
    query = '"], "topk": 999, "x": ["../../etc/passwd'
    started = time.monotonic()
    try:
        with pytest.raises(EnvError):
            search(query, retriever={"kind": "http", "url": server.url, "timeout": 0.5, "form": "queries"})
    finally:
        server.socket.close()
    assert time.monotonic() - started < 20  # not a timing: without a limit it would never end
    sent = json.loads(server.bodies[0])
    assert sent["queries"] == [query]
    assert sent["topk"] == 3
