"""Whatever a store holds, the audit ends with findings and never with a traceback."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgym.inspect.audit import audit
from stepgym.model.renderer import Renderer
from stepgym.model.renderer_files import save_renderer
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId

odd_text = st.one_of(st.text(max_size=12), st.sampled_from(["<|im_end|>", "<tool_call>", "</think>", "\ud800", ""]))
odd_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "stranger"])},
    optional={
        "content": st.one_of(st.none(), odd_text),
        "text": odd_text,
        "reasoning_content": odd_text,
        "tool_calls": st.lists(
            st.sampled_from(
                [
                    {},
                    {"function": None},
                    {"function": {"name": "guess", "arguments": "{"}},
                    {"id": "a", "type": "function", "function": {"name": "guess", "arguments": '{"number": 1}'}},
                ]
            ),
            max_size=2,
        ),
        "invalid_tool_calls": st.just([{"text": "x", "error": "y"}]),
    },
)
RENDERINGS = ("", "first", "extended", "appended", "thinking_stripped", "turn_closed", "odd")
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@st.composite
def odd_steps(draw: st.DrawFn) -> Step:
    ids = st.lists(st.integers(0, 300), max_size=6)
    response = draw(ids)
    count = len(response)
    return Step(
        prompt_ids=draw(ids),
        response_ids=response,
        loss_mask=draw(st.one_of(st.none(), st.lists(st.integers(-1, 2), min_size=count, max_size=count))),
        logprobs=draw(st.one_of(st.none(), st.lists(numbers, min_size=count, max_size=count))),
        reward=draw(numbers),
        reward_parts=draw(st.dictionaries(st.sampled_from("ab"), numbers, max_size=2)),
        sampler=draw(st.sampled_from(["policy", "scripted"])),
        status=draw(st.sampled_from(["ok", "malformed", "truncated", "no_action"])),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "odd"])),
        new_messages=draw(st.lists(odd_message, max_size=2)),
        message=draw(st.one_of(st.none(), odd_message)),
        rendering=draw(st.sampled_from([*RENDERINGS, "continued", "turn_reopened"])),
        sampling=draw(st.one_of(st.none(), st.just(Sampling(temperature=0.0, logprobs_kind="raw")))),
        stop=draw(st.lists(st.sampled_from(["", "</say>", "e"]), max_size=2)),
        max_tokens=draw(st.one_of(st.none(), st.integers(-1, 5))),
        follows=draw(st.one_of(st.none(), st.integers(-3, 4))),
        weights_versions=draw(
            st.lists(st.tuples(st.sampled_from(["1", "x2"]), st.integers(-2, 8), st.integers(-2, 8)), max_size=2)
        ),
    )


@st.composite
def odd_trajectories(draw: st.DrawFn) -> Trajectory:
    return Trajectory(
        id=TrajectoryId("train", 0, "t", draw(st.integers(0, 3)), draw(st.integers(0, 2))),
        outcome=draw(st.sampled_from(list(Outcome))),
        final=draw(st.booleans()),
        steps=draw(st.lists(odd_steps(), max_size=4)),
        reward=draw(st.one_of(st.none(), numbers)),
        tools=draw(st.sampled_from([(), ({"type": "function", "function": {"name": "guess", "parameters": {}}},)])),
        seeds=draw(st.sampled_from([{}, {"env": 1, "sampler": 2}])),
        provenance=draw(
            st.sampled_from(
                [
                    {},
                    {"limits": None, "template": 3, "template_date": "yesterday"},
                    {"turns": "continue", "max_observation_tokens": "few"},
                    {"turns": "continue", "max_observation_tokens": 1},
                    {"limits": {"max_prompt_tokens": 2, "context_length": "long"}, "template_date": "2031-02-03"},
                ]
            )
        ),
    )


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(odd_trajectories(), min_size=1, max_size=3, unique_by=lambda t: t.id), st.booleans())
def test_the_audit_of_anything_ends(saved: Path, trajectories: list[Trajectory], renderer: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with TrajectoryStore(Path(folder) / "trajectories", "a") as store:
            for trajectory in trajectories:
                store.append(trajectory)
        if renderer:
            (Path(folder) / "renderer").symlink_to(saved)
        found = audit(folder)
    assert found.trajectories == len(trajectories)
    assert found.to_dict()["counts"]["error"] == found.count("error")


@pytest.fixture(scope="module")
def saved(played: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_renderer(played["guess"][1], tmp_path_factory.mktemp("saved") / "renderer")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(odd_trajectories(), min_size=1, max_size=3, unique_by=lambda t: t.id))
def test_the_audit_of_anything_in_an_open_turn_ends(thinking: Path, trajectories: list[Trajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with TrajectoryStore(Path(folder) / "trajectories", "a") as store:
            for trajectory in trajectories:
                store.append(trajectory)
        (Path(folder) / "renderer").symlink_to(thinking)
        assert audit(folder).trajectories == len(trajectories)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = families.tokenizer_for(families.FAMILIES["thinking_kept"])
    renderer = Renderer(tokenizer, turns="continue", max_observation_tokens=2)
    return save_renderer(renderer, tmp_path_factory.mktemp("thinking") / "renderer")


def test_steps_without_ids_are_checked_as_far_as_they_go(guess: Any) -> None:
    bare = replace(
        guess.clean[0],
        steps=tuple(
            replace(s, prompt_ids=None, response_ids=None, loss_mask=None, logprobs=None, weights_versions=())
            for s in guess.clean[0].steps
        ),
    )
    found = guess.audit([replace(bare, reward=0.5), *guess.clean[1:]])
    assert [f.check for f in found.findings if f.severity != "note"] == ["reward_sum"]
    assert found.statistics["steps_without_ids"] == 3


def test_one_phase_may_be_named_as_a_string(guess: Any) -> None:
    other = replace(guess.clean[0], id=replace(guess.clean[0].id, phase="test", task_id="odd"), seeds={})
    guess.store([*guess.clean, other])
    assert audit(guess.folder, phases="test").trajectories == 1
    assert audit(guess.folder, phases=["test", "train"]).trajectories == 7
    assert np.isfinite(audit(guess.folder).seconds)
