from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from stepgym.errors import ContextOverflow, EngineError, EngineTimeout, UserError
from stepgym.model.engines.chat import OpenAIChatEngine
from stepgym.model.engines.connect import connect
from stepgym.model.engines.openai import NoTokenIds, OpenAIEngine
from stepgym.record.step import Sampling

PROMPT = np.array([60, 61, 62, 63], dtype=np.int32)
MODELS = {"object": "list", "data": [{"id": "m"}]}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def engine_for(server, **options):
    options = {"base_url": server.url, "model": "m", "tokenizer": "unused", "retries": 0, **options}
    return OpenAIEngine(**options)


def answer(**changes):
    choice = {
        "index": 0,
        "text": "x",
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "prompt_token_ids": PROMPT.tolist(),
        "logprobs": {"token_logprobs": [-0.5, -1.5]},
        **changes,
    }
    return {"choices": [{key: value for key, value in choice.items() if value != "absent"}]}


def unused_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


def test_ids_and_logprobs_are_those_of_the_engine_behind_the_server(start_server):
    server = start_server()

    async def main():
        engine = OpenAIEngine(base_url=server.url, model=server.name, tokenizer=server.folder, weights_version="v3")
        await engine.open()
        assert engine.context_length == 512
        assert engine.tokenizer.encode("Velor") == server.engine.tokenizer.encode("Velor")
        sampling = Sampling(temperature=0.8)
        there = await asyncio.gather(*(engine.generate(PROMPT, sampling, max_tokens=9, seed=i) for i in range(6)))
        here = await asyncio.gather(*(server.engine.generate(PROMPT, sampling, max_tokens=9, seed=i) for i in range(6)))
        await engine.close()
        return engine, there, here

    engine, there, here = run(main())
    assert (engine.kind, engine.sampler) == ("openai", "policy")
    for one, other in zip(there, here, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.logprobs.dtype == np.float32
        assert one.finish_reason == other.finish_reason
        assert one.weights_versions == [("v3", 0, len(one.response_ids))]


def test_stop_strings_keep_the_ids_that_overshoot_and_every_setting_is_sent(start_server):
    server = start_server()

    async def main():
        engine = OpenAIEngine(base_url=server.url, model=server.name, tokenizer=server.folder)
        await engine.open()
        greedy = Sampling(temperature=0.0, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=0.5)
        whole = await engine.generate(PROMPT, greedy, max_tokens=20, seed=2)
        text = engine.tokenizer.decode(whole.response_ids)
        stopped = await engine.generate(PROMPT, greedy, max_tokens=20, stop=[text[4:6]], stop_token_ids=[7], seed=2)
        await engine.close()
        return engine, whole, text, stopped

    engine, whole, text, stopped = run(main())
    ids = stopped.response_ids.tolist()
    assert ids == whole.response_ids.tolist()[: len(ids)]
    assert text[4:6] in engine.tokenizer.decode(ids)
    assert stopped.finish_reason == "stop"
    sent = server.requests[-1]
    assert sent["prompt"] == PROMPT.tolist()
    expected = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.5,
        "max_tokens": 20,
        "seed": 2,
        "stop": [text[4:6]],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "return_token_ids": True,
    }
    assert {key: sent[key] for key in expected} == expected


def test_a_prompt_that_is_too_long_is_a_context_overflow(start_server, canned):
    server = start_server()

    async def main(url, **options):
        engine = OpenAIEngine(base_url=url, retries=0, **options)
        await engine.generate(np.full(500, 60), Sampling(), max_tokens=20)

    with pytest.raises(ContextOverflow):
        run(main(server.url, model=server.name))
    for error in (
        {"message": "no", "param": "input_tokens"},
        {"message": "no", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 4096 tokens.\nHowever, you requested 5000."},
    ):
        with pytest.raises(ContextOverflow) as caught:
            run(main(canned((400, {"error": error})).url, model="m"))
        assert "\n" not in str(caught.value)
    with pytest.raises(EngineError, match="HTTP 400: top_k must be"):
        run(main(canned((400, {"error": {"message": "top_k must be positive"}})).url, model="m"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": "absent"}, "no token_ids"),
        ({"token_ids": None}, "no token_ids"),
        ({"token_ids": [5, "6"]}, "not token ids"),
        ({"token_ids": [5, -6]}, "not token ids"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "abort"}, "empty response"),
        ({"token_ids": [5] * 9}, "9 tokens where 8 were asked for"),
        ({"prompt_token_ids": [1, *PROMPT.tolist()]}, "changed the prompt"),
        ({"logprobs": None}, "no logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "1 logprobs for 2 tokens"),
        ({"logprobs": {"token_logprobs": [-1.0, None]}}, "not log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan")]}}, "not log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0, 0.5]}}, "not log-probabilities"),
        ({"finish_reason": "content_filter"}, "unknown reason"),
    ],
)
def test_an_answer_that_does_not_hold_together_is_an_engine_error(canned, changes, message):
    engine = engine_for(canned((200, answer(**changes))))
    with pytest.raises(EngineError, match=message) as caught:
        run(engine.generate(PROMPT, Sampling(), max_tokens=8))
    assert "\n" not in str(caught.value)


def test_minus_infinity_is_kept(canned):
    engine = engine_for(canned((200, answer(logprobs={"token_logprobs": [float("-inf"), -1.5]}))))
    found = run(engine.generate(PROMPT, Sampling(), max_tokens=8))
    assert found.logprobs.tolist() == [float("-inf"), -1.5]
    assert found.response_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, "<html>hello</html>"), "did not answer in JSON"),
        ((200, [1, 2]), "not an object"),
        ((200, {"choices": []}), "no choice"),
        ((200, {"choices": "many"}), "no choice"),
        ((200, {"error": {"message": "upstream\nfailed"}}), "upstream failed"),
        ((401, {"error": {"message": "bad key"}}), "HTTP 401: bad key"),
        ((500, "<html>a\nb</html>"), "HTTP 500"),
        (None, "cannot be reached"),
    ],
)
def test_garbage_and_failures_are_engine_errors_of_one_line(canned, reply, message):
    engine = engine_for(canned(reply))
    with pytest.raises(EngineError, match=message) as caught:
        run(engine.generate(PROMPT, Sampling(), max_tokens=8))
    assert "\n" not in str(caught.value)


def test_passing_failures_are_retried_and_others_are_not(canned):
    server = canned(None, (429, {}, {"retry-after": "0"}), (503, "busy", {"retry-after": "0"}), (200, answer()))
    assert len(run(engine_for(server, retries=3).generate(PROMPT, Sampling(), max_tokens=8)).response_ids) == 2
    assert len(server.received) == 4
    stubborn = canned((429, {}, {"retry-after": "0"}))
    with pytest.raises(EngineError, match="HTTP 429"):
        run(engine_for(stubborn, retries=2).generate(PROMPT, Sampling(), max_tokens=8))
    assert len(stubborn.received) == 3
    wrong = canned((400, {"error": {"message": "no"}}))
    with pytest.raises(EngineError, match="HTTP 400"):
        run(engine_for(wrong, retries=5).generate(PROMPT, Sampling(), max_tokens=8))
    assert len(wrong.received) == 1


def test_silence_is_a_timeout_and_is_not_asked_again(canned):
    server = canned(2.0)
    with pytest.raises(EngineTimeout, match=r"within 0.2 s"):
        run(engine_for(server, request_timeout=0.2, retries=3).generate(PROMPT, Sampling(), max_tokens=8))
    assert len(server.received) == 1


def test_one_engine_serves_several_event_loops(canned):
    engine = engine_for(canned((200, answer())), max_connections=2)

    async def several():
        found = await asyncio.gather(*(engine.generate(PROMPT, Sampling(), max_tokens=8) for _ in range(5)))
        return len(found)

    assert [run(several()), run(several())] == [5, 5]
    run(engine.close())
    run(engine.close())


def test_opening_says_what_is_wrong_in_one_line(start_server, canned):
    server = start_server()
    guarded = start_server(api_key="secret")
    for options, message in (
        ({"base_url": unused_url()}, "cannot be reached"),
        ({"model": "other"}, "does not serve the model 'other'; it serves tiny"),
        ({"tokenizer": "/nowhere/at/all"}, "tokenizer '/nowhere/at/all' cannot be loaded"),
        ({"base_url": guarded.url, "api_key": "wrong"}, "refuses the key"),
        ({"base_url": canned((404, "no")).url}, "--api chat"),
        ({"base_url": canned((500, "broken"), models=MODELS).url, "model": "m"}, "HTTP 500"),
    ):
        arguments = {"base_url": server.url, "model": "tiny", "tokenizer": server.folder, "retries": 0, **options}
        with pytest.raises(UserError, match=message) as caught:
            run(OpenAIEngine(**arguments).open())
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="base_url"):
        OpenAIEngine(base_url="localhost:8000", model="m")
    with pytest.raises(UserError, match="max_connections"):
        OpenAIEngine(base_url="http://x/v1", model="m", max_connections=0)
    with pytest.raises(EngineError, match="not open"):
        _ = engine_for(server).tokenizer
    run(OpenAIEngine(base_url=guarded.url, model="tiny", tokenizer=guarded.folder, api_key="secret").open())


def test_connect_takes_what_the_endpoint_can_do(start_server):
    server, silent = start_server(), start_server(token_ids=False)

    def kind(url, **options):
        return type(run(connect(url, "tiny", retries=0, **options)))

    assert kind(server.url, tokenizer=server.folder) is OpenAIEngine
    assert kind(server.url) is OpenAIChatEngine
    assert kind(server.url, tokenizer=server.folder, api="chat") is OpenAIChatEngine
    assert kind(silent.url, tokenizer=server.folder) is OpenAIChatEngine
    with pytest.raises(NoTokenIds, match="return_token_ids"):
        kind(silent.url, tokenizer=server.folder, api="completions")
    with pytest.raises(UserError, match="cannot be reached"):
        kind(unused_url(), tokenizer=server.folder)
    with pytest.raises(UserError, match="auto, chat or completions"):
        kind(server.url, api="both")
