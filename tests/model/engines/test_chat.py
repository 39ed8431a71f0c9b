from __future__ import annotations

import asyncio

import pytest

from stepgym.errors import ContextOverflow, EngineError, UserError
from stepgym.model.engines.chat import OpenAIChatEngine, put_back_stop
from stepgym.record.step import Sampling

QUESTION = [{"role": "user", "content": "What is his name?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
GREEDY = Sampling(temperature=0.0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def reply(message, finish_reason="stop", **choice):
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return (200, {"choices": [{"message": message, "finish_reason": finish_reason, **choice}], "usage": usage})


def ask(server, **options):
    engine = OpenAIChatEngine(base_url=server.url, model="m", retries=0)
    return run(engine.chat(QUESTION, Sampling(), max_tokens=9, **options))


def test_a_conversation_is_answered_by_a_real_server_and_its_stop_string_put_back(start_server):
    for tells in (True, False):
        server = start_server() if tells else start_server(tells=False)

        async def main(server):
            engine = OpenAIChatEngine(base_url=server.url, model="tiny")
            await engine.open()
            assert engine.context_length == 512
            whole = await engine.chat(QUESTION, GREEDY, max_tokens=30, tools=TOOLS, seed=4)
            text = whole.message["content"]
            stop = text[5:8]
            cut = await engine.chat(QUESTION, GREEDY, max_tokens=30, tools=TOOLS, stop=[stop], seed=4)
            await engine.close()
            return whole, stop, cut

        whole, stop, cut = run(main(server))
        text = whole.message["content"]
        expected = text[: text.index(stop)] + (stop if tells else "")
        assert cut.message["content"] == expected
        assert cut.finish_reason == "stop"
        prompt = server.engine.tokenizer.apply_chat_template(
            QUESTION, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert whole.prompt_tokens == len(prompt)
        assert 0 < cut.response_tokens < whole.response_tokens <= 30
        assert server.requests[-1]["tools"] == TOOLS
        assert server.requests[-1]["seed"] == 4


def test_tool_calls_reasoning_and_usage_come_through(canned):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I think"}
    found = ask(canned(reply(message, "tool_calls")), tools=TOOLS)
    assert found.message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
        "reasoning_content": "I think",
    }
    assert (found.finish_reason, found.prompt_tokens, found.response_tokens) == ("tool_calls", 7, 3)
    newer = ask(canned(reply({"content": "x", "reasoning": "so"})))
    assert newer.message == {"role": "assistant", "content": "x", "reasoning_content": "so"}
    bare = ask(canned((200, {"choices": [{"message": {"content": "x"}}], "usage": None})))
    assert (bare.message, bare.finish_reason, bare.prompt_tokens) == ({"role": "assistant", "content": "x"}, "stop", 0)


def test_stop_strings_are_put_back_only_where_they_were_cut_off():
    stop = ["</sql>", "</solution>"]
    assert put_back_stop("<think>x</think><sql>SELECT 1", stop) == "<think>x</think><sql>SELECT 1</sql>"
    assert put_back_stop("<sql>a</sql> then <solution>b", stop) == "<sql>a</sql> then <solution>b</solution>"
    assert put_back_stop("<sql>a</sql>", stop) == "<sql>a</sql>"
    assert put_back_stop("just text", stop) == "just text"
    assert put_back_stop("<sql>a <solution>b", stop) == "<sql>a <solution>b"  # which of the two, nobody can tell
    assert put_back_stop("Observation", ["\nObservation:"]) == "Observation"
    # A server that says what it stopped at is believed.
    assert put_back_stop("<sql>a", stop, told=True, stop_reason=None) == "<sql>a"
    assert put_back_stop("<sql>a", stop, told=True, stop_reason=151645) == "<sql>a"
    assert put_back_stop("<sql>a <solution>b", stop, told=True, stop_reason="</sql>") == "<sql>a <solution>b</sql>"
    assert put_back_stop("<sql>a</sql>", stop, told=True, stop_reason="</sql>") == "<sql>a</sql>"
    assert put_back_stop("x", ["\nObservation:"], told=True, stop_reason="\nObservation:") == "x\nObservation:"


def test_a_truncated_answer_gets_no_stop_string(canned):
    found = ask(canned(reply({"content": "<sql>SELECT"}, "length")), stop=["</sql>"])
    assert (found.message["content"], found.finish_reason) == ("<sql>SELECT", "length")


def test_only_unusual_settings_are_sent(canned):
    server = canned(reply({"content": "x"}))
    engine = OpenAIChatEngine(base_url=server.url, model="m", send_seed=False)
    run(engine.chat(QUESTION, Sampling(temperature=0.5), max_tokens=9, seed=3))
    assert server.received[-1] == (
        "/v1/chat/completions",
        {"model": "m", "messages": QUESTION, "temperature": 0.5, "top_p": 1.0, "max_tokens": 9},
    )
    run(engine.chat(QUESTION, Sampling(top_k=5, repetition_penalty=1.1), max_tokens=9))
    assert server.received[-1][1]["top_k"] == 5
    assert server.received[-1][1]["repetition_penalty"] == 1.1
    assert "min_p" not in server.received[-1][1]


def test_goes_over_to_max_completion_tokens_where_the_endpoint_asks_for_it(canned):
    refusal = {
        "error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead.", "param": "max_tokens"}
    }
    server = canned((400, refusal), reply({"content": "x"}))
    engine = OpenAIChatEngine(base_url=server.url, model="m")
    for _ in range(2):
        assert run(engine.chat(QUESTION, Sampling(), max_tokens=9)).message["content"] == "x"
    fields = [{k for k in body if k.startswith("max_")} for _, body in server.received]
    assert fields == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]
    fixed = OpenAIChatEngine(base_url=canned((400, refusal)).url, model="m", length_field="max_tokens")
    with pytest.raises(EngineError, match="HTTP 400"):
        run(fixed.chat(QUESTION, Sampling(), max_tokens=9))


def test_failures_are_errors_of_one_line(canned, start_server):
    for answer, message in (
        ((200, {"choices": [{"message": "x"}]}), "no message"),
        ((200, {}), "no message"),
        (reply({"content": ["x"]}), "not text"),
        (reply({"content": "x", "tool_calls": "f()"}), "not a list"),
        ((500, "oops"), "HTTP 500"),
    ):
        with pytest.raises(EngineError, match=message) as caught:
            ask(canned(answer))
        assert "\n" not in str(caught.value)
    long = [{"role": "user", "content": "Velor " * 600}]
    engine = OpenAIChatEngine(base_url=start_server().url, model="tiny")
    with pytest.raises(ContextOverflow):
        run(engine.chat(long, Sampling(), max_tokens=9))
    with pytest.raises(UserError, match="does not serve the model"):
        run(OpenAIChatEngine(base_url=start_server().url, model="none").open())
