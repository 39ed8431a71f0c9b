"""Fixtures for the whole suite: servers that really listen."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("stepgym", deadline=None)
settings.load_profile("stepgym")


def _load(name: str) -> ModuleType:
    """A helper module of tests/servers; tests are no package, so it is loaded by its path."""
    known = f"stepgym_test_servers_{name}"
    if known not in sys.modules:
        path = Path(__file__).parent / "servers" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A function that starts an OpenAI-compatible server around a tiny random model; see tests/servers/tiny_server.py.

    `start_server()` is the usual one, shared by all tests; options (`api_key`, `token_ids`, `tells`) make another.
    """
    import torch

    from stepgym.model.engines.transformers import TransformersEngine
    from stepgym.model.tiny import build_tiny_model, save_tiny_model

    torch.set_num_threads(1)
    tiny_server = _load("tiny_server")
    corpus = ["Velor lives in Narn. <sql>SELECT name FROM people WHERE age > 12</sql> What is his name? " * 2] * 20
    model, tokenizer = build_tiny_model(corpus, width=32, layers=1, heads=2, special_tokens=["<sql>", "</sql>"])
    folder = str(save_tiny_model(tmp_path_factory.mktemp("served") / "model", model, tokenizer))
    running: dict[str, Any] = {}

    def start(**options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in running:
            engine = TransformersEngine.wrap(model, tokenizer, name="tiny", context_length=512)
            from stepgym.env.worker import run_blocking

            run_blocking(engine.open())
            running[key] = tiny_server.serve(engine, folder, name="tiny", **options)
        return running[key]

    yield start
    for server in running.values():
        server.stop()


@pytest.fixture
def canned() -> Iterator[Callable[..., Any]]:
    """A function that starts a server which says what it is told to; see tests/servers/canned_server.py."""
    started: list[Any] = []

    def start(*answers: Any, **options: Any) -> Any:
        started.append(_load("canned_server").CannedServer(*answers, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()
