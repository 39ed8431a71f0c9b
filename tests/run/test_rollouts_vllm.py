"""Rollouts through a real vLLM server: exact ids, recomputed logprobs, a server that is killed, hard cases."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections import Counter

import numpy as np
import pytest
import torch

from stepgym import OutcomePolicy, TrajectoryStore
from stepgym.env.worker import run_blocking
from stepgym.inspect.audit import GapOptions, audit
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling
from stepgym.run.env_source import EnvSource
from stepgym.run.evaluation import split_tasks
from stepgym.run.rollouts import RolloutConfig, collect
from stepgym.run.tally import Tally

pytestmark = pytest.mark.vllm

SQL = {
    "instructions": "none",
    "observation_format": "brief",
    "show_schema": False,
    "kinds": ["count"],
    "tables": 1,
    "columns": 2,
    "rows": 4,
    "max_turns": 3,
}


def tasks(count):
    return run_blocking(split_tasks(EnvSource.of("sql", **SQL), "train", count))


def play(engine, count, *, samples=1, **options):
    config = RolloutConfig(samples=samples, concurrency=32, max_response_tokens=options.pop("max_tokens", 16))
    return run_blocking(
        collect("sql", tasks(count), engine, env_config=SQL, config=options.pop("config", config), seed=5, **options)
    )


def logged(served, known, count):
    """What the server says it was sent and returned, after the first `known` requests."""
    found = Counter()
    for line in served.requests(at_least=known + count)[known:]:
        choice = line["response"]["choices"][0]
        logprobs = tuple(np.float32(entry["logprob"]) for entry in choice["logprobs"]["content"])
        found[tuple(line["request"]["token_ids"]), tuple(choice["token_ids"]), logprobs] += 1
    return found


def recorded(steps):
    return Counter((tuple(s.prompt_ids.tolist()), tuple(s.response_ids.tolist()), tuple(s.logprobs)) for s in steps)


def test_200_episodes_hold_exactly_the_ids_of_the_servers_own_log(serve_vllm, tmp_path):
    served = serve_vllm()
    known = len(served.requests())
    with TrajectoryStore(tmp_path / "trajectories", "a") as store:
        play(served.engine, 50, samples=4, store=store)
    trajectories = list(TrajectoryStore(tmp_path / "trajectories"))
    assert len(trajectories) == 200
    assert {t.outcome for t in trajectories} <= {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.RESPONSE_TRUNCATED}
    steps = [step for t in trajectories for step in t.steps]
    assert len(steps) > 400
    assert recorded(steps) == logged(served, known, len(steps))
    gaps = [np.abs(s.logprobs - served.logprobs(s.prompt_ids, s.response_ids)) for s in steps[:200]]
    assert np.concatenate(gaps).mean() < 1e-3
    assert all(s.weights_versions[0][0] == served.engine.weights_version for s in steps)
    # The audit finds the same, from the store alone.
    model = GapOptions(str(served.folder), weights_version=served.engine.weights_version)
    found = audit(tmp_path / "trajectories", tokenizer=str(served.folder), model=model)
    assert found.logprob_gap.steps == len(steps)
    assert found.logprob_gap.mean < 1e-3
    assert (found.count("error"), found.count("warning")) == (0, 0), found.findings


def test_in_one_open_turn_episodes_hold_exactly_the_ids_of_the_servers_own_log(serve_vllm, tmp_path):
    """A model of random weights, cut off in most turns; and one that mostly ends its turn, so that it is reopened."""
    served = serve_vllm()
    renderer = Renderer(served.engine.tokenizer, turns="continue", max_observation_tokens=6)
    terse = says_nothing(copy.deepcopy(served.model), certainty=2.0)
    for name, model, said in (("random", served.model, "continued"), ("terse", terse, "turn_reopened")):
        folder, store = tmp_path / name, TrajectoryStore(tmp_path / f"{name}-trajectories", "a")
        model.save_pretrained(folder)
        served.tokenizer.save_pretrained(folder)
        run_blocking(served.engine.load_weights(folder, name))
        known = len(served.requests())
        try:
            with store:
                found = play(served.engine, 6, samples=2, renderer=renderer, store=store)
        finally:
            run_blocking(served.engine.load_weights(served.folder, "restored"))
        steps = [step for t in found for step in t.steps]
        assert recorded(steps) == logged(served, known, len(steps))
        assert Counter(step.rendering for step in steps)[said] > 12
        for before, after in ((t.steps[n], t.steps[n + 1]) for t in found for n in (0, 1)):
            ended = before.response_ids[-1] in renderer.stop_token_ids
            observation = renderer.encode("".join(message["content"] for message in after.new_messages))[:6]
            assert after.rendering == ("turn_reopened" if ended else "continued")
            assert after.prompt_ids.tolist() == [*before.full_ids[: before.length - ended].tolist(), *observation]
        gap = GapOptions(str(folder), weights_version=name)
        checked = audit(tmp_path / f"{name}-trajectories", tokenizer=str(served.folder), model=gap)
        assert checked.logprob_gap.steps == len(steps)
        assert checked.logprob_gap.mean < 1e-3
        assert (checked.count("error"), checked.count("warning")) == (0, 0), checked.findings


def test_a_server_killed_in_the_middle_of_a_rollout_costs_attempts_but_no_reward(serve_vllm, tmp_path):
    engine = serve_vllm(retries=0, max_connections=32).engine
    server = engine.servers[0]
    policy = OutcomePolicy.from_config({"max_infrastructure_share": 0.9})
    store, tally = TrajectoryStore(tmp_path, "a"), Tally()

    async def main():
        async def kill():
            while tally.episodes < 40:
                await asyncio.sleep(0.01)
            while not engine._members[0].under_way:
                await asyncio.sleep(0)
            os.kill(server.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        config = RolloutConfig(samples=2, concurrency=32, max_response_tokens=24)
        found = await collect(
            "sql", tasks(60), engine, env_config=SQL, config=config, seed=5, store=store, policy=policy, tally=tally
        )
        await killing
        return found

    final = run_blocking(main())
    store.close()
    everything = list(TrajectoryStore(tmp_path))
    lost = [t for t in everything if t.outcome is Outcome.ENGINE_ERROR]
    assert server.starts == 2
    assert len(final) == 120
    assert all(t.outcome.scored and t.reward is not None for t in final)
    assert lost, "nothing was under way when the server was killed"
    assert all(not t.final and t.reward is None for t in lost)
    assert len(everything) == 120 + len(lost)
    assert {(*t.id.group, t.id.sample) for t in lost} <= {(*t.id.group, t.id.sample) for t in final if t.id.attempt}


def says_nothing(model, *, certainty=300.0):
    """The model with weights that make the end of the turn certain, whatever stands before it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # every position then only sees its own token
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1.0
        embedding[model.config.eos_token_id] = 0.0
        embedding[model.config.eos_token_id, 0] = certainty
    return model


def test_a_model_that_says_nothing_plays_to_the_turn_limit(serve_vllm, tmp_path):
    served = serve_vllm()
    says_nothing(copy.deepcopy(served.model)).save_pretrained(tmp_path / "mute")
    run_blocking(served.engine.load_weights(tmp_path / "mute", "mute"))
    try:
        found = play(served.engine, 4)
    finally:
        run_blocking(served.engine.load_weights(served.folder, "restored"))
    for trajectory in found:
        assert trajectory.outcome is Outcome.TURN_LIMIT
        assert [step.status for step in trajectory.steps] == ["no_action"] * 3
        assert [len(step.response_ids) for step in trajectory.steps] == [1, 1, 1]
        assert trajectory.steps[0].message["text"] == ""


def test_a_first_prompt_over_the_limit_is_a_context_overflow_and_is_not_sent(serve_vllm):
    served = serve_vllm()
    asked = len(served.requests())
    found = play(served.engine, 3, config=RolloutConfig(max_prompt_tokens=5))
    assert {t.outcome for t in found} == {Outcome.CONTEXT_OVERFLOW}
    assert all(t.steps == () for t in found)
    assert len(served.requests()) == asked


def test_what_the_server_finds_too_long_is_a_context_overflow(serve_vllm):
    served = serve_vllm()
    limit, served.engine.context_length = served.engine.context_length, None  # nobody told us of a limit
    try:
        found = run_blocking(
            collect(
                "sql",
                tasks(2),
                served.engine,
                env_config={**SQL, "instructions": "full", "show_schema": True, "rows": 40},
                config=RolloutConfig(max_response_tokens=480),
            )
        )
    finally:
        served.engine.context_length = limit
    assert {t.outcome for t in found} <= {Outcome.CONTEXT_OVERFLOW, Outcome.RESPONSE_TRUNCATED, Outcome.TURN_LIMIT}


def test_more_episodes_than_connections_are_all_played(serve_vllm):
    served = serve_vllm(retries=0, max_connections=32)
    found = run_blocking(
        collect(
            "sql",
            tasks(100),
            served.engine,
            env_config=SQL,
            config=RolloutConfig(concurrency=100, max_response_tokens=4),
            sampling=Sampling(temperature=0.9),
        )
    )
    assert len(found) == 100
    assert all(t.outcome.scored for t in found)
