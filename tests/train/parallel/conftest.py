"""`ranks(function, size=2, **arguments)`: what a function of the test file gives on each of several gloo processes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, str(Path(__file__).parent / "fork_server.py"), str(tmp_path_factory.mktemp("ranks"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


@pytest.fixture
def all_answers(fork_server: subprocess.Popen[str]) -> Callable[..., list[dict[str, Any]]]:
    """As `ranks`, but with errors as answers: a list of {"code", "result", "error"}."""

    def run(
        function: Callable[..., Any], *, size: int = 2, timeout: float = 90, **arguments: Any
    ) -> list[dict[str, Any]]:
        request = {
            "file": inspect.getfile(function),
            "function": function.__name__,
            "size": size,
            "timeout": timeout,
            "arguments": arguments,
        }
        assert fork_server.stdin is not None
        assert fork_server.stdout is not None
        fork_server.stdin.write(json.dumps(request, default=str) + "\n")
        fork_server.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(fork_server.stdout.readline())
        return answers

    return run


@pytest.fixture
def ranks(all_answers: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[Any]]:
    def run(function: Callable[..., Any], **arguments: Any) -> list[Any]:
        answers = all_answers(function, **arguments)
        for rank, answer in enumerate(answers):
            assert answer["code"] == 0, f"rank {rank}: {answer['error']}\n{answer.get('trace', '')}"
        return [answer["result"] for answer in answers]

    return run
