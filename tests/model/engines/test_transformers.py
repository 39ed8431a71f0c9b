from __future__ import annotations

import asyncio
import copy
import threading

import numpy as np
import pytest
import torch
import transformers as hf

from stepgym.errors import ContextOverflow, EngineError, UserError
from stepgym.model.engines.forward import SeparateForward, SlotForward
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.tiny import build_tiny_model, save_tiny_model
from stepgym.record.step import Sampling

torch.set_num_threads(1)

CORPUS = ["Velor lives in Narn. <sql>SELECT name FROM people WHERE age > 12;</sql> Is (Velor) é or 日本 ?"] * 20
MODEL, TOKENIZER = build_tiny_model(CORPUS, width=32, layers=2, heads=4, key_value_heads=2, special_tokens=["</sql>"])
VOCABULARY = MODEL.config.vocab_size
END = TOKENIZER.eos_token_id
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def make(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():  # larger than the usual initialisation, so that errors show
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.2)
    return model


ARCHITECTURES = {
    "qwen3": lambda: make(hf.Qwen3Config(**SIZES)),
    "qwen2": lambda: make(hf.Qwen2Config(**SIZES)),
    "llama": lambda: make(hf.LlamaConfig(**SIZES)),
    "mistral, sliding window": lambda: make(hf.MistralConfig(**SIZES, sliding_window=8)),
    "gemma2, sliding window and softcap": lambda: make(hf.Gemma2Config(**SIZES, sliding_window=8)),
    "gpt2": lambda: make(hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=1)),
    "gpt-oss, sinks": lambda: make(hf.GptOssConfig(**SIZES, num_local_experts=4, sliding_window=8)),
    "lfm2, convolutions": lambda: make(hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
}
IN_ONE_PASS = {name for name in ARCHITECTURES if "sinks" not in name and "convolutions" not in name}


def forced_logprobs(model, prompt, response, temperature=1.0):
    """float32 [R]: log-softmax(logits / T) of the response under one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def prompts(count, *, vocabulary=VOCABULARY, low=3, high=60, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocabulary, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


async def episode(engine, prompt, *, turns=3, max_tokens=9, seed=0, sampling=Sampling(), observed=5):  # noqa: B008
    """Turns that each extend the last one token for token; returns (prompt, completion) pairs."""
    rng = np.random.default_rng(seed)
    found = []
    for turn in range(turns):
        answer = await engine.generate(prompt, sampling, max_tokens=max_tokens, seed=100 * seed + turn)
        found.append((prompt, answer))
        seen = rng.integers(2, 90, observed).astype(np.int32)
        prompt = np.concatenate([prompt, answer.response_ids, seen])
    return found


def endless_engine(**options):
    """An engine whose responses end at their limit only."""
    model, tokenizer = build_tiny_model(CORPUS, width=32, layers=1, heads=2, context_length=100_000)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    return TransformersEngine.wrap(model, tokenizer, **options)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def gather(*coroutines):
    async def both():
        return await asyncio.gather(*coroutines)

    return run(both())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_are_those_of_a_plain_forward_pass_under_batching_and_reuse(name, caplog):
    model = ARCHITECTURES[name]()
    engine = TransformersEngine.wrap(model, TOKENIZER, max_batch_size=5, max_prefill_tokens=37)
    sampling = Sampling(temperature=0.7)
    found = gather(
        *(episode(engine, p, seed=i, sampling=sampling) for i, p in enumerate(prompts(8, vocabulary=97, high=40)))
    )
    forward = engine._driver.batcher._forward
    assert isinstance(forward, SlotForward if name in IN_ONE_PASS else SeparateForward), caplog.text
    for turns in found:
        for number, (prompt, answer) in enumerate(turns):
            expected = forced_logprobs(model, prompt, answer.response_ids, 0.7)
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
            assert answer.logprobs.dtype == np.float32
            assert answer.response_ids.dtype == np.int32
            if number and turns[number - 1][1].finish_reason == "length":
                # All that the turn before computed was there still: its prompt, and its response but the last token.
                before = len(turns[number - 1][0]) + len(turns[number - 1][1].response_ids) - 1
                assert answer.metrics["reused_tokens"] == before


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "gpt-oss, sinks"])
def test_greedy_equals_generate(name):
    model = ARCHITECTURES[name]()
    engine = TransformersEngine.wrap(model, TOKENIZER)
    some = prompts(6, vocabulary=97)
    greedy = Sampling(temperature=0.0)
    found = gather(*(engine.generate(p, greedy, max_tokens=20) for p in some))
    for prompt, answer in zip(some, found, strict=True):
        config = hf.GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=[1, END], pad_token_id=0)
        expected = model.generate(torch.from_numpy(prompt.astype(np.int64))[None], generation_config=config)
        assert answer.response_ids.tolist() == expected[0, len(prompt) :].tolist()
        np.testing.assert_allclose(answer.logprobs, forced_logprobs(model, prompt, answer.response_ids), atol=1e-4)


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_from_the_cache():
    some = prompts(12)

    def all_turns(engine, *, together):
        if together:
            found = gather(*(episode(engine, p, seed=i) for i, p in enumerate(some)))
        else:
            found = [run(episode(engine, p, seed=i)) for i, p in enumerate(some)]
        return [answer.response_ids.tolist() for turns in found for _, answer in turns]

    crowd = TransformersEngine.wrap(MODEL, TOKENIZER)
    expected = all_turns(crowd, together=True)
    assert all_turns(crowd, together=True) == expected  # now everything comes from the cache
    alone = TransformersEngine.wrap(MODEL, TOKENIZER, max_batch_size=1, prefix_cache=False)
    assert all_turns(alone, together=False) == expected
    few = TransformersEngine.wrap(MODEL, TOKENIZER, max_batch_size=3, cache_tokens=4 * 2048)
    assert all_turns(few, together=True) == expected
    assert len({tuple(ids) for ids in expected}) > 30


def test_alone_and_without_cache_the_logprobs_are_the_same_to_the_last_bit():
    some = prompts(3)
    results = []
    for _ in range(2):
        engine = TransformersEngine.wrap(MODEL, TOKENIZER, max_batch_size=1, prefix_cache=False)
        found = gather(*(episode(engine, p, seed=i) for i, p in enumerate(some)))
        results.append([answer.logprobs.tobytes() for turns in found for _, answer in turns])
    assert results[0] == results[1]


def test_sampling_follows_the_distribution_and_the_seed():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER)
    prompt = np.array([5, 6, 7], dtype=np.int32)
    found = gather(*(engine.generate(prompt, Sampling(), max_tokens=1, seed=i) for i in range(3000)))
    with torch.no_grad():
        expected = torch.softmax(MODEL(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1], -1).numpy()
    counts = np.bincount([int(a.response_ids[0]) for a in found], minlength=VOCABULARY)
    error = (counts / 3000 - expected) / np.sqrt(expected * (1 - expected) / 3000)
    assert np.abs(error).max() < 5
    unseeded = gather(*(engine.generate(prompt, Sampling(), max_tokens=4) for _ in range(8)))
    assert len({tuple(a.response_ids) for a in unseeded}) > 1


def test_group_prompt_is_computed_once():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER)
    prompt = prompts(1, low=50, high=51)[0]
    found = gather(*(engine.generate(prompt, Sampling(), max_tokens=5, seed=i) for i in range(8)))
    assert sorted(a.metrics["reused_tokens"] for a in found) == [0] + [49] * 7
    for answer in found:
        np.testing.assert_allclose(answer.logprobs, forced_logprobs(MODEL, prompt, answer.response_ids), atol=1e-4)


def test_new_weights_take_effect_and_nothing_of_the_old_ones_is_reused():
    model, tokenizer = build_tiny_model(CORPUS, width=32, layers=1, heads=2)
    engine = TransformersEngine.wrap(model, tokenizer)
    prompt = prompts(1, low=50, high=51, vocabulary=model.config.vocab_size)[0]
    first = run(engine.generate(prompt, Sampling(), max_tokens=6, seed=1))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.from_numpy(prompt.astype(np.int64))[None]).logits.square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    with engine.paused():
        optimizer.step()
        engine.weights_version = 7
    second = run(engine.generate(prompt, Sampling(), max_tokens=6, seed=1))
    assert model.training
    assert second.metrics["reused_tokens"] == 0
    assert first.weights_versions == [("0", 0, len(first.response_ids))]
    assert second.weights_versions == [("7", 0, len(second.response_ids))]
    np.testing.assert_allclose(second.logprobs, forced_logprobs(model, prompt, second.response_ids), atol=1e-4)
    assert np.abs(second.logprobs - forced_logprobs(model, prompt, first.response_ids)).max() > 1e-3


def test_parameters_that_were_replaced_are_taken_over_with_the_next_version():
    model, tokenizer = build_tiny_model(CORPUS, width=32, layers=1, heads=2)
    engine = TransformersEngine.wrap(model, tokenizer)
    prompt = prompts(1, vocabulary=model.config.vocab_size)[0]
    run(engine.generate(prompt, Sampling(), max_tokens=2, seed=1))
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 3)
    engine.weights_version = 1
    answer = run(engine.generate(prompt, Sampling(), max_tokens=6, seed=1))
    np.testing.assert_allclose(answer.logprobs, forced_logprobs(model, prompt, answer.response_ids), atol=1e-4)


def test_long_sequences_make_the_cache_grow_and_stay_right():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER, stop_token_ids=[])
    some = prompts(3, low=230, high=250)

    async def main():
        return await asyncio.gather(*(episode(engine, p, seed=i, max_tokens=40, turns=8) for i, p in enumerate(some)))

    lengths = []
    for turns in run(main()):
        prompt, answer = turns[-1]
        lengths.append(len(prompt))
        np.testing.assert_allclose(answer.logprobs, forced_logprobs(MODEL, prompt, answer.response_ids), atol=1e-4)
    assert max(lengths) > 300


def test_a_version_change_amid_a_response_is_recorded_as_spans():
    engine = endless_engine()

    async def main():
        await engine.open()
        running = asyncio.create_task(engine.generate(np.array([5, 6]), Sampling(), max_tokens=1000, seed=3))
        batcher = engine._driver.batcher
        while not batcher._running or batcher._known.max() < 10:
            await asyncio.sleep(0.001)
        engine.weights_version = "1"
        answer = await running
        follow = await engine.generate(np.concatenate([[5, 6], answer.response_ids]), Sampling(), max_tokens=2)
        return answer, follow

    answer, follow = run(main())
    (old, zero, cut), (new, again, end) = answer.weights_versions
    assert (old, zero, new, end) == ("0", 0, "1", 1000)
    assert cut == again
    assert 8 <= cut < 1000
    assert follow.metrics["reused_tokens"] == 1001  # all of it was computed again by the new weights


@pytest.mark.parametrize("name", ["qwen3", "gemma2, sliding window and softcap", "lfm2, convolutions"])
def test_amid_a_response_every_logprob_is_that_of_the_weights_that_its_span_names(name):
    """Also for requests that share a prompt, wait, or have computed only a part of their prompt."""
    model = ARCHITECTURES[name]()
    model.generation_config.eos_token_id = None
    tokenizer = build_tiny_model(CORPUS, width=32, layers=1, heads=2)[1]
    tokenizer.eos_token = None
    engine = TransformersEngine.wrap(model, tokenizer, max_batch_size=4, max_prefill_tokens=16, context_length=400)
    some = prompts(4, vocabulary=97, low=30, high=60)
    asked = [some[0], some[0], *some]
    versions = {"0": copy.deepcopy(model)}

    async def main():
        await engine.open()
        running = [
            asyncio.create_task(engine.generate(p, Sampling(), max_tokens=40, seed=n)) for n, p in enumerate(asked)
        ]
        while not all(task.done() for task in running):
            await asyncio.sleep(0.01)
            with engine.paused(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
                versions[str(len(versions))] = copy.deepcopy(model)
                engine.weights_version = str(len(versions) - 1)
        return [task.result() for task in running]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = run(main())
    changed = 0
    for prompt, answer in zip(asked, found, strict=True):
        spans = list(answer.weights_versions)
        assert [0, *(end for _, _, end in spans)] == [*(start for _, start, _ in spans), len(answer.response_ids)]
        changed += len(spans) > 1
        for version, start, end in spans:
            expected = forced_logprobs(versions[version], prompt, answer.response_ids)
            np.testing.assert_allclose(answer.logprobs[start:end], expected[start:end], atol=2e-3)
    assert changed


def test_stop_strings_are_found_across_tokens_and_kept_with_what_overshoots():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER)
    greedy = Sampling(temperature=0.0)
    prompt = prompts(1)[0]
    whole = run(engine.generate(prompt, greedy, max_tokens=40)).response_ids
    text = TOKENIZER.decode(whole)
    for start in range(0, len(text) - 4, 3):
        stop = text[start : start + 3]
        answer = run(engine.generate(prompt, greedy, max_tokens=40, stop=["never this", stop]))
        ids = answer.response_ids.tolist()
        assert ids == whole.tolist()[: len(ids)]
        assert answer.finish_reason == "stop"
        assert stop in TOKENIZER.decode(ids)
        assert stop not in TOKENIZER.decode(ids[:-1]) or "\ufffd" in stop


def test_terminators_end_a_response_and_are_kept():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER, stop_token_ids=[11])
    found = gather(*(engine.generate(np.array([3, 4]), Sampling(), max_tokens=2000, seed=i) for i in range(24)))
    ends = {int(a.response_ids[-1]) for a in found}
    assert ends == {END, 11}
    for answer in found:
        assert answer.finish_reason == "stop"
        assert not np.isin(answer.response_ids[:-1], [END, 11]).any()
    asked = gather(
        *(
            engine.generate(np.array([3, 4]), Sampling(), max_tokens=2000, seed=i, stop_token_ids=[12])
            for i in range(24)
        )
    )
    assert 12 in {int(a.response_ids[-1]) for a in asked}
    short = run(engine.generate(np.array([3, 4]), Sampling(), max_tokens=3, seed=0))
    assert (short.finish_reason, len(short.response_ids)) == ("length", 3)


def test_truncation_and_penalties_act_on_their_own_row_only():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER)
    prompt = np.array([5, 6, 7], dtype=np.int32)
    with torch.no_grad():
        logits = MODEL(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    plain = Sampling()

    async def main():
        mixed = [Sampling(top_k=2), plain, Sampling(top_p=1e-6), Sampling(min_p=1.0), Sampling(presence_penalty=1e9)]
        return await asyncio.gather(
            *(engine.generate(prompt, s, max_tokens=8, seed=i) for i in range(40) for s in mixed)
        )

    found = run(main())
    first = [{int(a.response_ids[0]) for a in found[i::5]} for i in range(5)]
    assert first[0] == set(order[:2])
    assert len(first[1]) > 5
    assert first[2] == first[3] == {order[0]}
    for answer in found[4::5]:
        assert len(set(answer.response_ids.tolist())) == len(answer.response_ids)
    alone = gather(*(engine.generate(prompt, plain, max_tokens=8, seed=i) for i in range(40)))
    assert [a.response_ids.tolist() for a in alone] == [a.response_ids.tolist() for a in found[1::5]]
    for answer in found:  # logprobs are those of the whole distribution, whatever was cut off
        np.testing.assert_allclose(answer.logprobs, forced_logprobs(MODEL, prompt, answer.response_ids), atol=1e-4)


def test_cancelled_requests_leave_the_batch_and_the_others_go_on():
    engine = endless_engine(max_batch_size=2)

    async def main():
        hung = [asyncio.create_task(engine.generate(np.array([5]), Sampling(), max_tokens=90_000)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in hung:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*hung, return_exceptions=True))
        return await engine.generate(np.array([5]), Sampling(), max_tokens=5)

    assert len(run(main()).response_ids) == 5
    with engine.paused():
        assert not engine._driver.batcher.busy


def test_two_event_loops_share_one_engine():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER)
    some = prompts(6)
    results = {}

    def loop(name):
        results[name] = gather(*(episode(engine, p, seed=i) for i, p in enumerate(some)))

    both = [threading.Thread(target=loop, args=(name,)) for name in "ab"]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    one, other = ([a.response_ids.tolist() for turns in results[name] for _, a in turns] for name in "ab")
    assert one == other


def test_bad_requests_are_refused_with_one_line():
    engine = TransformersEngine.wrap(MODEL, TOKENIZER, context_length=50)
    fine = np.arange(3, 23)

    def refused(error, ids=fine, sampling=Sampling(), max_tokens=5):  # noqa: B008
        with pytest.raises(error) as caught:
            run(engine.generate(ids, sampling, max_tokens=max_tokens))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "fit the context of 50" in refused(ContextOverflow, max_tokens=31)
    assert len(run(engine.generate(fine, Sampling(), max_tokens=30, seed=1)).response_ids) > 0
    assert str(VOCABULARY) in refused(EngineError, ids=np.array([3, VOCABULARY]))
    refused(EngineError, ids=np.array([3, -1]))
    refused(EngineError, ids=np.array([], dtype=np.int32))
    refused(EngineError, max_tokens=0)
    refused(UserError, sampling=Sampling(temperature=-1.0))
    refused(UserError, sampling=Sampling(top_p=0.0))
    refused(UserError, sampling=Sampling(temperature=float("nan")))
    run(engine.close())
    run(engine.close())
    assert "closed" in refused(EngineError)


def test_a_failing_model_fails_its_requests_and_the_engine_goes_on(monkeypatch):
    engine = TransformersEngine.wrap(MODEL, TOKENIZER)
    run(engine.open())
    forward = engine._driver.batcher._forward
    engine._driver.batcher._forward = None  # not callable: the next pass raises
    with pytest.raises(EngineError, match="the model failed"):
        run(engine.generate(np.array([5]), Sampling(), max_tokens=5))
    engine._driver.batcher._forward = forward
    assert len(run(engine.generate(np.array([5]), Sampling(), max_tokens=5, seed=0)).response_ids) > 0


def test_logits_that_are_not_numbers_are_an_engine_error():
    model, tokenizer = build_tiny_model(CORPUS, width=32, layers=1, heads=2)
    engine = TransformersEngine.wrap(model, tokenizer)
    run(engine.open())
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="not numbers"):
        run(engine.generate(np.array([5]), Sampling(), max_tokens=5))


def test_closing_fails_what_runs_and_what_comes_after():
    engine = endless_engine()

    async def main():
        await engine.open()
        running = asyncio.create_task(engine.generate(np.array([5]), Sampling(), max_tokens=90_000))
        await asyncio.sleep(0.02)
        await engine.close()
        return await asyncio.gather(running, return_exceptions=True)

    (result,) = run(main())
    assert isinstance(result, EngineError)
    with pytest.raises(EngineError, match="closed"):
        run(engine.generate(np.array([5]), Sampling(), max_tokens=1))


def test_loads_from_a_folder_and_names_what_cannot_be_loaded(tmp_path):
    folder = save_tiny_model(tmp_path / "model", MODEL, TOKENIZER)
    engine = TransformersEngine(model=str(folder))
    with pytest.raises(EngineError, match="not open"):
        _ = engine.tokenizer
    run(engine.open())
    assert engine.context_length == 2048
    assert engine.tokenizer.encode("Velor") == TOKENIZER.encode("Velor")
    prompt = prompts(1)[0]
    answer = run(engine.generate(prompt, Sampling(), max_tokens=5, seed=1))
    np.testing.assert_allclose(answer.logprobs, forced_logprobs(MODEL, prompt, answer.response_ids), atol=1e-4)
    run(engine.close())

    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        run(TransformersEngine(model=str(empty)).open())
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="takes 2048 tokens"):
        run(TransformersEngine.wrap(MODEL, TOKENIZER, context_length=4096).open())
    with pytest.raises(UserError, match="cache_tokens"):
        run(TransformersEngine.wrap(MODEL, TOKENIZER, cache_tokens=100).open())
    with pytest.raises(UserError, match="max_batch_size"):
        TransformersEngine(model="x", max_batch_size=0)
