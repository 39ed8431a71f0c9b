from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepgym_search.retrievers.remote import HTTPRetriever

from stepgym.cli.main import run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(*arguments)` runs the verb in a process of its own."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, port: str = "0") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from stepgym.cli.main import main; main()", "serve-retriever"]
        process = subprocess.Popen(
            [*command, "--port", port, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """What the process prints once it answers; it ends the test if it prints nothing."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        _, errors = process.communicate()
        pytest.fail(f"no URL; stderr: {errors}")
    return line


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=40)
    return process.returncode, out, errors


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_a_corpus_and_ends_in_order(start: Any, passages: Path, sent: signal.Signals) -> None:
    process = start("--corpus", str(passages), "retriever.k1=1.2", "server.max_topk=2")
    url = url_of(process)
    # It answers at once, and what it answers comes from the file.
    retriever = HTTPRetriever(url=url, retries=0)
    assert [document.id for document in retriever.search(["harbour mayor"], 1)[0]] == ["ost"]
    health = httpx.get(f"{url}/health", trust_env=False).json()
    assert (health["retriever"], health["documents"]) == ("bm25s", 5)
    refused = httpx.post(f"{url}/retrieve", json={"query": "a", "topk": 3}, trust_env=False)
    assert refused.json() == {"detail": "topk is 3, but must be from 1 to 2"}
    process.send_signal(sent)  # while the retriever's connection is still open
    code, out, errors = ended(process)
    assert (code, out) == (130, "")
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    retriever.close()
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass  # the port is free again


def test_without_a_corpus_it_serves_the_encyclopedia(start: Any) -> None:
    process = start("--articles", "200", "encyclopedia.seed=5", "encyclopedia.names=short")
    url = url_of(process)
    assert httpx.get(f"{url}/health", trust_env=False).json()["documents"] == 200
    assert len(httpx.post(f"{url}/retrieve", json={"query": "born"}, trust_env=False).json()["result"][0]) == 3


def test_it_may_serve_another_server(start: Any, serve_app: Any, echo: Any) -> None:
    from stepgym_search.server.app import create_app

    inner = serve_app(create_app(echo)).url
    url = url_of(start("--retriever", "http", f"retriever.url={inner}"))
    answer = httpx.post(f"{url}/retrieve", json={"query": "a", "topk": 1}, trust_env=False)
    assert answer.json() == {"result": [[{"id": "0", "contents": '"a"\nText 0.'}]]}
    assert httpx.get(f"{url}/health", trust_env=False).json()["retriever"] == "http"


def test_an_interrupt_while_a_search_runs_lets_it_end(start: Any, raw_server: Any, retrieval_servers: Any) -> None:
    def slow(connection: socket.socket, request: Any) -> None:
        time.sleep(1.0)
        document = {"id": "1", "contents": "late"}
        connection.sendall(retrieval_servers.answer(200, {"result": [[{"document": document, "score": 1.0}]]}))

    behind = raw_server(slow)
    process = start("--retriever", "http", f"retriever.url={behind.url}")
    url = url_of(process)
    with httpx.Client(trust_env=False, timeout=30) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, f"{url}/retrieve", json={"query": "a"})
        end = time.monotonic() + 10
        while not behind.requests and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert answer.result(30).json() == {"result": [[{"id": "1", "contents": "late"}]]}
    assert ended(process)[0] == 130


HANGS = """
import time
class Hangs:
    needs_corpus = False
    def __init__(self, corpus, *, seconds: float = 1e6):
        self.seconds = seconds
    def search(self, queries, k):
        time.sleep(self.seconds)
    def close(self):
        raise AssertionError("a search is still running")
"""


@pytest.mark.slow
def test_a_search_that_hangs_is_given_up_when_the_server_is_to_end(start: Any, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGS)
    process = start("--retriever", "hanging:Hangs")
    url = url_of(process)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{url}/retrieve", json={"query": "a"}, trust_env=False, timeout=60)
        end = time.monotonic() + 10
        while httpx.get(f"{url}/health", trust_env=False).json()["searches"] < 1 and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert answer.result(60).status_code == 503
        assert answer.result().json() == {"detail": "the search failed: the search has been closed"}
    code, _, errors = ended(process)
    assert code == 130
    assert errors.splitlines() == ["interrupted"]


# ---- bad input -------------------------------------------------------------------------------------------------------


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the verb ends with, exit code 2."""
    code = run(["serve-retriever", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_a_port_that_is_taken_is_told_before_an_index_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = failed(capsys, "--port", port, "--corpus", str(tmp_path / "not there either"))
    told = f"cannot listen on port {port} of 127.0.0.1: Address already in use; --port 0 picks a free one"
    assert line == f"error: serve-retriever: {told}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--corpus", "missing.jsonl"], "there is no corpus at"),
        (["--retriever", "bm25"], "unknown retriever 'bm25'; did you mean 'bm25s'?"),
        (["retriever.k2=1"], "unknown field 'k2'"),
        (["retriever.k1=-1"], "k1"),
        (["server.max_top=1"], "server: unknown field 'max_top'; did you mean 'max_topk'?"),
        (["server.max_body_mb=0", "--corpus", "missing.jsonl"], "server.max_body_mb: expected greater than 0, got 0"),
        (["server.max_topk=0"], "server.max_topk: expected greater than 0, got 0"),
        (["server.max_topk=many"], "server.max_topk: expected an integer, got 'many'"),
        (["sever.max_topk=1"], "unknown section 'sever'; did you mean 'server'?"),
        (["encyclopedia.sed=1"], "encyclopedia: unknown field 'sed'; did you mean 'seed'?"),
        (["encyclopedia.seed=x"], "encyclopedia.seed: expected an integer, got 'x'"),
        (["encyclopedia=5"], "encyclopedia: expected a mapping of fields, got 5"),
        (["--articles", "7"], "articles"),
        (["--articles", "200", "--corpus", "a.jsonl"], "--articles is for the generated encyclopedia"),
        (["encyclopedia.seed=1", "--corpus", "a.jsonl"], "encyclopedia is for the generated encyclopedia"),
        (["--retriever", "http"], "the field 'url' is missing"),
        (
            ["--retriever", "http", "retriever.url=http://localhost:1", "--articles", "200"],
            "the retriever 'http' has its passages already: no --articles",
        ),
        (["--host", "no.such.host.invalid"], "is no address"),
        (["--port", "70000"], "65535"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    if "--port" not in arguments:
        arguments = ["--port", "0", *arguments]
    assert told in failed(capsys, *arguments)


def test_a_missing_library_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert failed(capsys) == ("error: serve-retriever needs the package 'uvicorn': pip install 'stepgym[search]'")


def test_the_signal_handler_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    failed(capsys, "--port", "0", "--corpus", "missing.jsonl")
    assert signal.getsignal(signal.SIGTERM) is before
