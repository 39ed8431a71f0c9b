"""`stepgym audit`: a real run is clean, a planted fault closes the gate, and bad input is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepgym.record.store import TrajectoryStore


@pytest.fixture
def faulty(trained: Path, tmp_path: Path) -> Path:
    """The run, with rewards that do not add up in one trajectory."""
    shutil.copytree(trained / "renderer", tmp_path / "renderer")
    with TrajectoryStore(trained / "trajectories") as store, TrajectoryStore(tmp_path / "trajectories", "a") as copy:
        for number, trajectory in enumerate(store.read(phase="train", iteration=1)):
            last = trajectory.steps[-1]
            spoilt = (*trajectory.steps[:-1], replace(last, reward=last.reward + 0.25))
            copy.append(replace(trajectory, steps=spoilt) if number == 0 else trajectory)
    return tmp_path


def test_a_trained_run_is_clean_and_its_logprobs_are_the_models(trained: Path, stepgym: Callable[..., Any]) -> None:
    answer = stepgym("audit", trained, "--model", "auto", "--device", "cpu", "--fail-on", "warning", "--json", "-")
    assert answer.code == 0, answer.out + answer.err
    report = json.loads(answer.out)
    assert report["failed"] == []
    assert report["counts"]["error"] == report["counts"]["warning"] == 0
    assert {c["check"] for c in report["checks"] if c["status"] == "skipped"} == set()
    gap = report["logprob_gap"]
    assert gap["steps"] > 0
    assert gap["max"] < 1e-3
    assert {each["version"] for each in gap["versions"]} <= set(report["statistics"]["weights_versions"])
    assert set(report["statistics"]["phases"]) >= {"expert", "train", "test", "validation"}


def test_the_table_shows_every_check_and_the_figures(trained: Path, stepgym: Callable[..., Any]) -> None:
    from stepgym.inspect.audit import CHECKS

    answer = stepgym("audit", trained, "--phase", "train", "--all")
    assert answer.code == 0, answer.out + answer.err
    for name in CHECKS:
        assert name in answer.out
    assert "zero variance share" in answer.out
    assert "the gate (error) holds" in answer.out
    assert "skipped logprob_gap: no model was given" in answer.out


def test_what_found_nothing_is_not_listed(trained: Path, stepgym: Callable[..., Any]) -> None:
    answer = stepgym("audit", trained, "--phase", "expert")
    assert answer.code == 0, answer.out + answer.err
    assert "checks found nothing (--all lists them)" in answer.out
    assert "prompt_drift" not in answer.out
    assert "mismatches" not in answer.out
    assert all(len(line) <= 80 for line in answer.out.splitlines() if line.startswith(("│", "┃", "└")))


def test_severities_and_names_go_together(faulty: Path, stepgym: Callable[..., Any]) -> None:
    answer = stepgym("audit", faulty, "--fail-on", "error,logprob_gap")
    assert answer.code == 1
    assert "fails on reward_sum, logprob_gap" in answer.out
    assert stepgym("audit", faulty, "--phase", "train", "--fail-on", "prompt_drift,warning").code == 1


def test_a_model_that_nothing_could_be_compared_with_is_no_pass(trained: Path, stepgym: Callable[..., Any]) -> None:
    model = next((trained / "checkpoints").glob("update-*/model"))
    answer = stepgym(
        "audit", trained, "--phase", "expert", "--model", model.parent.parent / model.parent.name / "model",
        "--device", "cpu", "--fail-on", "logprob_gap",
    )  # fmt: skip
    assert answer.code == 1, answer.out + answer.err
    assert "no step could be compared with the model (scripted)" in answer.out


def test_what_a_model_said_never_steers_the_terminal(
    faulty: Path, stepgym: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("escapes")
    shutil.copytree(faulty / "renderer", folder / "renderer")
    from stepgym.model.renderer_files import load_renderer

    ids = load_renderer(folder / "renderer").encode("<sql>\x1b[2J\x1b]0;gone\x07</sql>")
    with TrajectoryStore(faulty / "trajectories") as store, TrajectoryStore(folder / "trajectories", "a") as copy:
        one = next(store.read())
        step = replace(
            one.steps[0],
            response_ids=ids,
            loss_mask=None,
            logprobs=[0.5] * len(ids),
            weights_versions=(),
            new_messages=({"role": "user", "content": "\x1b[31m"},),
        )
        copy.append(replace(one, id=replace(one.id, task_id="\x1b[2Jtask"), steps=(step,)))
    answer = stepgym("audit", folder, "--limit", "20")
    assert answer.code == 1
    assert "logprob_values" in answer.out
    assert "\\e[2J" in answer.out
    assert "\x1b" not in answer.out
    assert "\x07" not in answer.out


def test_a_fault_closes_the_gate(faulty: Path, stepgym: Callable[..., Any], tmp_path: Path) -> None:
    answer = stepgym("audit", faulty, "--json", tmp_path / "audit.json")
    assert answer.code == 1
    assert "error  reward_sum: train/1/" in answer.out
    assert "the gate (error) fails on reward_sum" in answer.out
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["failed"] == ["reward_sum"]
    assert report["findings"][0]["check"] == "reward_sum"
    assert stepgym("audit", faulty, "--fail-on", "reward_sum,prompt_drift").code == 1
    assert stepgym("audit", faulty, "--fail-on", "prompt_drift").code == 0


def test_a_named_check_that_was_skipped_is_no_pass(faulty: Path, stepgym: Callable[..., Any]) -> None:
    shutil.rmtree(faulty / "renderer")
    assert stepgym("audit", faulty, "--fail-on", "prompt_drift").code == 1
    assert stepgym("audit", faulty / "trajectories", "--fail-on", "prompt_drift").code == 1


def test_steps_without_ids_are_counted_as_not_checked(
    faulty: Path, stepgym: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chat")
    with TrajectoryStore(faulty / "trajectories") as store, TrajectoryStore(folder / "trajectories", "a") as copy:
        one = list(store.read())[1]
        bare = {"prompt_ids": None, "response_ids": None, "loss_mask": None, "logprobs": None, "weights_versions": ()}
        copy.append(replace(one, steps=tuple(replace(step, **bare) for step in one.steps)))
    answer = stepgym("audit", folder)
    assert (
        f"{len(one.steps)} of {len(one.steps)} steps have no token ids: nothing about tokens was checked" in answer.out
    )


def test_a_tokenizer_may_be_given(trained: Path, stepgym: Callable[..., Any]) -> None:
    answer = stepgym("audit", trained / "trajectories", "--tokenizer", trained / "renderer", "--json", "-")
    assert answer.code == 0, answer.out + answer.err
    skipped = [c["check"] for c in json.loads(answer.out)["checks"] if c["status"] == "skipped"]
    assert skipped == ["logprob_gap"]


def test_only_as_many_findings_are_shown_as_asked_for(faulty: Path, stepgym: Callable[..., Any]) -> None:
    answer = stepgym("audit", faulty, "--limit", "0")
    assert answer.code == 1
    assert "error  reward_sum" not in answer.out
    assert "more findings are not shown" in answer.out


def test_runs_keep_their_renderer(trained: Path) -> None:
    settings = json.loads((trained / "renderer" / "renderer.json").read_text())
    assert settings["kind"] == "template"
    assert settings["history"] == "template"
    assert "add_generation_prompt" in settings["chat_template"]
    assert (trained / "renderer" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}/nowhere"], "no such run"),
        (["{folder}", "--fail-on", "reward_sun"], "did you mean 'reward_sum'"),
        (["{folder}", "--dtype", "int8"], "--dtype must be"),
        (["{folder}", "--weights-version", "3"], "give --model too"),
        (["{folder}", "--phase", "trian"], "no trajectories of phase trian"),
        (["{folder}", "--tokenizer", "/no/such/tokenizer"], "there is no such folder"),
        (["{folder}", "--json", "/no/such/folder/file.json"], "there is no folder for this file"),
        (["{folder}", "--model", "/no/such/model", "--weights-version", "0"], "/no/such/model"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, faulty: Path, stepgym: Callable[..., Any]) -> None:
    answer = stepgym("audit", *(argument.format(folder=faulty) for argument in arguments))
    assert answer.code == 2, answer.out + answer.err
    assert said in answer.err
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1


def test_the_documentation_lists_every_check() -> None:
    from stepgym.inspect.audit import CHECKS

    page = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text()
    for check in CHECKS.values():
        assert f"| `{check.name}` | {check.promise} | {check.needs or '–'} |" in page
