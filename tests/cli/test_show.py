"""`stepgym show`: what stands on the screen, and what never gets there."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stepgym.cli.transcript import all_lines
from stepgym.inspect.show import show
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId


def stored(folder: Path, *steps: Step, **fields: Any) -> Path:
    fields = {"outcome": Outcome.COMPLETED, "reward": 1.0, "success": True, **fields}
    with TrajectoryStore(folder, "a") as store:
        store.append(Trajectory(id=TrajectoryId("rollout", 0, "task", 0), steps=steps, **fields))
    return folder


def said(text: str, **fields: Any) -> Step:
    message = {"role": "assistant", "content": text, "text": text, **fields.pop("message", {})}
    return Step(prompt_ids=fields.pop("prompt_ids", [1]), response_ids=[2], message=message, **fields)


def test_a_trained_episode_as_a_conversation(stepgym: Callable[..., Any], trained: Path) -> None:
    done = stepgym("show", trained, "train", "--best")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    with TrajectoryStore(trained / "trajectories") as store:
        trajectory = store.load(lines[0])
        key = trajectory.id
        group = list(store.read(phase=key.phase, iteration=key.iteration, task_id=key.task_id))
    assert (trajectory.id.phase, trajectory.reward) == ("train", 1.0)
    header = {line[:11].strip(): line[12:] for line in lines[1:12]}
    assert header["outcome"] == "completed"
    assert header["reward"] == "1  success yes  range 0 to 1"
    rewards = [f"{t.reward:.4g}" for t in sorted(group, key=lambda t: t.id)]
    rewards[trajectory.id.sample] = f"[{rewards[trajectory.id.sample]}]"
    assert header["group"] == f"rewards {' '.join(rewards)}"
    assert "grpo, 4 of the group count" in header["advantage"]
    assert str(trajectory.seeds["sampler"]) in header["seeds"]
    assert trajectory.provenance["template"] in header["made by"]
    titles = [line for line in lines if line.startswith("── assistant")]
    assert len(titles) == len(trajectory.steps)
    assert "· step 0 · turn 1 ·" in titles[0]
    assert "first" in titles[0]
    assert "reward 1" in titles[-1]
    assert all(step.message["text"].splitlines()[0] in lines for step in trajectory.steps if step.message)
    assert "Open the box." in lines
    assert "\x1b" not in done.out  # a pipe is no terminal


def test_token_by_token(stepgym: Callable[..., Any], trained: Path) -> None:
    done = stepgym("show", trained, "train", "--best", "--tokens")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    shown = show(trained, lines[0])
    rows = [line.split(maxsplit=6) for line in lines if line.strip() and line.split()[0].isdigit()]
    steps = shown.trajectory.steps
    new = [0, *(len(steps[i].full_ids) for i in range(len(steps) - 1))]  # every prompt extends the step before
    assert len(rows) == sum(len(step.full_ids) - kept for step, kept in zip(steps, new, strict=True))
    sampled = [row for row in rows if row[2] == "yes"]
    ids = [token for step in steps for token in step.response_ids]
    assert [int(row[1]) for row in sampled] == ids
    assert [float(row[3]) for row in sampled] == pytest.approx(
        [value for step in steps for value in step.logprobs], abs=1e-4
    )
    advantages = shown.advantages
    assert advantages is not None
    assert {row[5] for row in sampled} == {f"{advantages[0]:+.4f}"}
    assert [row[4] for row in sampled if row[4] != "–"] == [f"{step.reward:.4g}" for step in steps]
    text = "".join(json.loads(row[6]) for row in sampled[: len(steps[0].response_ids)] if "\\x" not in row[6])
    assert text.startswith(steps[0].message["text"][:4])
    assert all(set(row[2:6]) == {"–"} for row in rows if row[2] != "yes")
    assert "tokens as in an earlier step" in done.out
    whole = stepgym("show", trained, lines[0], "--tokens", "--full").out
    assert "tokens as in an earlier step" not in whole
    assert len([line for line in whole.splitlines() if line[:8].strip().isdigit()]) == sum(s.length for s in steps)


def test_the_record_as_json(stepgym: Callable[..., Any], trained: Path) -> None:
    done = stepgym("show", trained, "train", "--first", "--json")
    found = json.loads(done.out)
    assert found == show(trained, "train", pick="first").to_dict()
    assert found["trajectory"]["steps"][0]["response_ids"]


def test_without_a_tokenizer_ids_are_shown(stepgym: Callable[..., Any], trained: Path, tmp_path: Path) -> None:
    folder = stored(tmp_path / "store", said("hello", logprobs=[-0.25]))
    done = stepgym("show", folder, "--first", "--tokens")
    assert done.code == 0
    assert "the run keeps no tokenizer" in done.err
    row = next(line.split() for line in done.out.splitlines() if "-0.2500" in line)
    assert row == ["1", "2", "yes", "-0.2500", "0", "–"]
    model = next((trained / "checkpoints").glob("*/model"))
    given = stepgym("show", folder, "--first", "--tokens", "--tokenizer", model)
    assert given.err == ""
    assert any(line.endswith('"') for line in given.out.splitlines() if " yes " in line)


@pytest.mark.parametrize("options", [(), ("--full",), ("--tokens",), ("--json",)])
def test_nothing_a_model_said_steers_the_terminal(
    stepgym: Callable[..., Any], tmp_path: Path, options: tuple[str, ...]
) -> None:
    bad = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e[red]x[/red]\x00\ud800"
    call = {"id": bad, "type": "function", "function": {"name": bad, "arguments": bad}}
    step = said(
        bad,
        message={"tool_calls": [call], "invalid_tool_calls": [{"text": bad, "error": bad}]},
        new_messages=[{"role": bad, "content": bad, "tool_call_id": bad}, {"role": "user", "content": [{"text": bad}]}],
        reward_parts={bad: 1.0},
        finish_reason=bad,
        rendering=bad,
        weights_versions=[(bad, 0, 1)],
    )
    folder = stored(
        tmp_path / "store", step, outcome_detail=bad, error=bad, reward_parts={bad: 1.0}, seeds={bad: 1},
        task={"id": bad, "answer": bad}, env_id=bad, env_config={bad: bad}, provenance={bad: bad},
        tools=[{"function": {"name": bad}}],
    )  # fmt: skip
    done = stepgym("show", folder, "--first", *options)
    assert done.code == 0
    assert not set(done.out) & set("\x1b\x07\x9b\u202e\x00")
    done.out.encode()
    if not options:
        assert "\\e[2J\\e]0;owned\\x07\\x9b31m\\u202e[red]x[/red]\\0\\ud800" in done.out


def test_colour_only_on_a_terminal(trained: Path) -> None:
    shown = show(trained, "train", pick="best")

    def printed(**options: Any) -> str:
        console = Console(file=io.StringIO(), markup=False, highlight=False, soft_wrap=True, **options)
        for line in all_lines(shown, full=False, tokens=True, kept=[0] * len(shown.trajectory.steps)):
            console.print(line)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "\x1b[" in printed(force_terminal=True, color_system="standard")
    assert "\x1b" not in printed()


def test_tools_thinking_and_side_conversations(stepgym: Callable[..., Any], tmp_path: Path) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "guess", "arguments": '{"number": 50}'}}
    result = {"role": "tool", "content": "low", "tool_call_id": "call_0"}
    folder = stored(
        tmp_path / "store",
        said("", message={"tool_calls": [call], "text": "<think>hm</think>"}, metrics={"env_turn": 1.0}, status="ok"),
        said("a critic", new_messages=[{"role": "user", "content": "Is it good?"}]),
        said("", new_messages=[result], follows=0, status="malformed",
             message={"invalid_tool_calls": [{"text": "{", "error": "not JSON"}]}),
    )  # fmt: skip
    out = stepgym("show", folder, "--first").out
    assert '  calls guess({"number": 50})' in out
    assert "<think>hm</think>" in out
    assert "step 1 begins a conversation" in out
    assert "step 2 goes on from step 0" in out
    assert "step 1 · not given to the environment" in out
    assert "── tool call_0 ─" in out
    assert "  call that does not parse: not JSON" in out


def test_chat_steps_are_shown_as_text(stepgym: Callable[..., Any], tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "It is 12.", "text": "It is 12."}
    question = {"role": "user", "content": "How old?"}
    step = Step(prompt_ids=None, response_ids=None, message=message, new_messages=[question])
    folder = stored(tmp_path / "store", step)
    for options in ((), ("--tokens",)):
        done = stepgym("show", folder, "--first", *options)
        assert (done.code, done.err) == (0, "")
        assert "It is 12." in done.out
        assert "no ids (its engine speaks only chat)" in done.out


def test_long_texts_are_cut_unless_asked_for(stepgym: Callable[..., Any], tmp_path: Path) -> None:
    result = {"role": "tool", "content": "x" * 5000, "tool_call_id": "call_0"}
    folder = stored(tmp_path / "store", said("done", new_messages=[result]))
    cut = stepgym("show", folder, "--first").out
    assert "[… 3,800 characters cut …]" in cut
    assert "x" * 5000 in stepgym("show", folder, "--first", "--full").out


def test_a_failed_attempt_says_so(stepgym: Callable[..., Any], tmp_path: Path) -> None:
    fields: dict[str, Any] = {"outcome": Outcome.ENV_ERROR, "reward": None, "success": None, "final": False}
    error = "Traceback\n  File ...\nRuntimeError: the lid fell off"
    folder = stored(tmp_path / "store", outcome_detail="the lid fell off", error=error, **fields)
    out = stepgym("show", folder, "--first").out
    assert "(not final: repeated, never counted)" in out
    assert "env_error (the lid fell off)" in out
    assert "none (could not be scored)" in out
    assert "error       RuntimeError: the lid fell off" in out


def test_in_an_open_turn_what_the_model_did_not_see_of_an_observation_is_said(
    stepgym: Callable[..., Any], tmp_path: Path
) -> None:
    answer = [{"role": "user", "content": "A long observation."}]
    folder = stored(
        tmp_path / "store",
        said("look", prompt_ids=[1, 5], rendering="first"),  # and the response is 2
        said("look", prompt_ids=[1, 5, 2, 7, 8], rendering="continued", follows=0, new_messages=answer),
        said("look", prompt_ids=[1, 5, 2, 7, 8, 9, 9], rendering="turn_reopened", follows=1, new_messages=answer),
        said("4", prompt_ids=[1, 5, 2, 7, 8, 9, 9, 2, 9], rendering="continued", follows=2, new_messages=answer),
        provenance={"turns": "continue", "max_observation_tokens": 2},
    )
    lines = stepgym("show", folder, "--first").out.splitlines()
    notes = [
        number for number, line in enumerate(lines) if line.startswith("(the model saw no more than its first 2 tokens")
    ]
    assert [lines[number - 1] for number in notes] == ["A long observation."] * 2
    assert [lines[number + 2].split(" · ")[1] for number in notes] == ["step 1", "step 2"]
    tokens = stepgym("show", folder, "--first", "--tokens").out
    rows = [line.split()[1] for line in tokens.splitlines() if line.strip() and line.split()[0].isdigit()]
    assert rows == [*"15", "2", *"78", "2", *"99", "2", "9", "2"]  # each id once: what was new, and what was said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("RUN",), "which trajectory?"),
        (("RUN", "test"), "no trajectory's id begins with 'test'"),
        (("RUN", "--first", "--best"), "--first and --best exclude each other"),
        (("RUN", "--first", "--tokenizer", "nowhere"), "has no effect without --tokens"),
        (("RUN", "--first", "--tokens", "--tokenizer", "./nowhere"), "no such folder with a tokenizer"),
        (("nowhere", "--first"), "no such run"),
    ],
)
def test_bad_input_is_one_line(
    stepgym: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    folder = stored(tmp_path / "store", said("hello"))
    done = stepgym("show", *(folder if word == "RUN" else word for word in arguments))
    assert done.code == 2
    assert line in done.err
    assert len(done.err.strip().splitlines()) == 1
