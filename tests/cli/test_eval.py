"""`stepgym eval` against a server that really listens, and in this process; its numbers, its store, its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from stepgym.record.store import TrajectoryStore

ENV = ["--env", "colours:Colours", "--tasks", "6", "--json", "rollout.max_response_tokens=8"]
NAMES = {"mean_reward", "pass_at", "ci95", "episodes", "outcomes", "wall_s"}  # DESIGN 7


def check(done: Any, out: Path, episodes: int) -> dict[str, Any]:
    """That an evaluation went through and says what it must. Returns what it printed."""
    assert done.code == 0, done.err
    said: dict[str, Any] = json.loads(done.out)
    assert set(said) >= NAMES
    assert said["episodes"] == sum(said["outcomes"].values()) == episodes
    low, high = said["ci95"]
    assert 0 <= low <= said["mean_reward"] <= high <= 1
    summary = json.loads((out / "summary.json").read_text())
    assert {name: summary[name] for name in said} == said
    assert (out / "config.yaml").exists()
    return said


@pytest.mark.parametrize("api", ["completions", "auto"])
def test_with_a_tokenizer_every_token_is_recorded(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path, api: str
) -> None:
    server, out = start_server(), tmp_path / "run"
    where = ["--base-url", server.url, "--model", server.name, "--tokenizer", server.folder, "--api", api]
    before = len(server.requests)
    said = check(stepgym("eval", *ENV, *where, "--samples", 2, "--out", out), out, 12)
    assert list(said["pass_at"]) == ["1", "2"]
    sent = [body for body in server.requests[before:] if "prompt" in body]
    table = datasets.load_dataset("parquet", data_files=str(out / "trajectories" / "*.parquet"), split="train")
    assert len(table) == 12
    with TrajectoryStore(out / "trajectories") as store:
        steps = [step for trajectory in store for step in trajectory.steps]
    assert said["turns"] == len(steps)
    assert said["prompt_tokens"] == sum(len(step.prompt_ids) for step in steps if step.prompt_ids is not None)
    prompts = [body["prompt"] for body in sent]
    assert all(step.prompt_ids is not None and step.prompt_ids.tolist() in prompts for step in steps)


@pytest.mark.parametrize("api", ["chat", "auto"])
def test_without_one_messages_are_sent(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path, api: str
) -> None:
    server, out = start_server(), tmp_path / "run"
    where = ["--base-url", server.url, "--model", server.name, "--api", api, "--temperature", 0.5]
    before = len(server.requests)
    said = check(stepgym("eval", *ENV, *where, "--out", out), out, 6)
    sent = [body for body in server.requests[before:] if body.get("temperature") == 0.5]
    assert len(sent) >= said["turns"]
    assert all("messages" in body for body in sent)
    with TrajectoryStore(out / "trajectories") as store:
        assert all(step.prompt_ids is None for trajectory in store for step in trajectory.steps)
    assert said["prompt_tokens"] > said["response_tokens"] > 0


def test_auto_goes_over_to_chat_where_no_ids_come_back(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path
) -> None:
    server, out = start_server(token_ids=False), tmp_path / "run"
    where = ["--base-url", server.url, "--model", server.name, "--tokenizer", server.folder]
    check(stepgym("eval", *ENV, *where, "--out", out), out, 6)
    with TrajectoryStore(out / "trajectories") as store:
        assert all(step.prompt_ids is None for trajectory in store for step in trajectory.steps)


def test_in_one_open_turn_through_an_endpoint_that_takes_ids(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path
) -> None:
    server, out = start_server(), tmp_path / "run"
    where = ["--base-url", server.url, "--model", server.name, "--tokenizer", server.folder]
    settings = ["renderer.turns=continue", "renderer.max_observation_tokens=3"]
    check(stepgym("eval", *ENV, *where, *settings, "--out", out), out, 6)
    with TrajectoryStore(out / "trajectories") as store:
        steps = [step for trajectory in store for step in trajectory.steps]
    assert {step.rendering for step in steps} <= {"first", "continued", "turn_reopened"}
    assert len(steps) > 6
    done = stepgym("audit", out, "--fail-on", "warning")
    assert done.code == 0, done.out


def test_endpoints_that_speak_only_chat_cannot_go_on_in_an_open_turn(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path
) -> None:
    told, silent = start_server(), start_server(token_ids=False)
    for name, server, more in (("a", told, ["--api", "chat"]), ("b", silent, ["--tokenizer", silent.folder])):
        where = ["--base-url", server.url, "--model", server.name, *more, "--out", tmp_path / name]
        done = stepgym("eval", *ENV, *where, "renderer.turns=continue")
        assert done.code == 2
        assert "renderer.turns: continue needs an engine that takes token ids" in done.err
        assert "Traceback" not in done.err


def test_a_trained_model_with_its_recipe(stepgym: Callable[..., Any], trained: Path, tmp_path: Path) -> None:
    """The command that `stepgym train` ends with."""
    summary, out = json.loads((trained / "summary.json").read_text()), tmp_path / "run"
    where = ["--engine", "transformers", "--model", summary["model"], "--recipe", trained / "config.yaml"]
    said = check(stepgym("eval", "--env", "colours:Colours", *where, "--tasks", 12, "--json", "--out", out), out, 12)
    # The same weights on the same tasks with the same seed; only the phase, and so the draws, differ.
    assert said["tasks"] == summary["held_out_tasks"]
    greedy = stepgym("eval", *where, "--temperature", 0, "--tasks", 12, "--json", "--out", tmp_path / "greedy")
    assert json.loads(greedy.out)["success"] == pytest.approx(summary["greedy_after"])


def test_the_same_folder_plays_only_what_is_missing(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path
) -> None:
    server, out = start_server(), tmp_path / "run"
    arguments = [*ENV, "--base-url", server.url, "--model", server.name, "--tokenizer", server.folder, "--out", out]
    first = check(stepgym("eval", *arguments), out, 6)
    before = [body for body in server.requests if body.get("max_tokens") == 8]
    again = check(stepgym("eval", *arguments), out, 6)
    assert len([body for body in server.requests if body.get("max_tokens") == 8]) == len(before) >= 6
    assert {n: v for n, v in again.items() if n != "wall_s"} == {n: v for n, v in first.items() if n != "wall_s"}
    other = stepgym("eval", *arguments, "--seed", 1)
    assert other.code == 2
    assert "made with another config" in other.err


def test_two_runs_are_compared_task_by_task(
    stepgym: Callable[..., Any], recipe: Path, trained: Path, tmp_path: Path
) -> None:
    model = json.loads((trained / "summary.json").read_text())["model"]
    sides = [tmp_path / "a", tmp_path / "b"]
    for out, steps in zip(sides, (1, 3), strict=True):
        where = ["--recipe", recipe, "--engine", "transformers", "--model", model, f"env.max_turns={steps}"]
        assert stepgym("eval", *where, "--tasks", 12, "--samples", 2, "--out", out).code == 0
    done = stepgym("eval", "--compare", *sides, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["tasks"] == 12
    assert said["success"]["a"] == 0.0  # one turn opens the box, and no more
    assert said["success"]["difference"] == said["success"]["b"] > 0
    assert 0 <= said["success"]["p_value"] <= 1
    table = stepgym("eval", "--compare", *sides).out
    assert said["verdict"].split(":")[0] in " ".join(table.split())
    refused = stepgym("eval", "--compare", sides[0], trained)
    assert (refused.code, refused.out) == (2, "")
    assert "one phase, iteration and environment" in refused.err


def test_an_endpoint_that_fails_often_is_incomplete(
    stepgym: Callable[..., Any], canned: Callable[..., Any], tmp_path: Path
) -> None:
    good = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    message = {"role": "assistant", "content": "<say>open</say>"}
    good |= {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    answers = [(200, good)] * 4 + [(400, {"error": {"message": "no more today", "type": "x", "code": 400}})]
    server = canned(*answers, models={"object": "list", "data": [{"id": "m", "object": "model"}]})
    where = ["--env", "colours:Colours", "--base-url", server.url, "--model", "m", "--api", "chat", "--json"]
    out = tmp_path / "run"
    done = stepgym("eval", *where, "--tasks", 4, "--out", out, "rollout.concurrency=1")
    assert done.code == 3, done.err
    said = json.loads(done.out)
    assert said["incomplete"] is True
    assert said["excluded"]["engine_error"] >= 2
    assert said["episodes"] + said["excluded"]["engine_error"] == 4
    assert "no more today" in done.err
    assert json.loads((out / "summary.json").read_text())["incomplete"] is True


def test_a_run_whose_endpoint_is_gone_stops(
    stepgym: Callable[..., Any], canned: Callable[..., Any], tmp_path: Path
) -> None:
    """Over 20 % infrastructure faults in a window stop the run, with exit code 3; what was played is kept."""
    refusal = (400, {"error": {"message": "no more today", "type": "x", "code": 400}})
    server = canned(refusal, models={"object": "list", "data": [{"id": "m", "object": "model"}]})
    where = ["--env", "colours:Colours", "--base-url", server.url, "--model", "m", "--api", "chat"]
    done = stepgym("eval", *where, "--tasks", 12, "--samples", 4, "--out", tmp_path / "run")
    assert done.code == 3
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "failed by infrastructure" in done.err
    assert len(TrajectoryStore(tmp_path / "run" / "trajectories")) >= 20
