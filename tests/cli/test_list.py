from __future__ import annotations

import json
from typing import Any

import pytest

from stepgym.cli.list import Kind, entries_of
from stepgym.cli.main import run
from stepgym.credit import CREDITS
from stepgym.model.engines import ENGINES


def listed(kind: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert run(["list", kind, "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


def test_environments_with_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    sql = listed("envs", capsys)["stepgym/sql-v0"]
    assert sql["kind"] == "environment"
    assert sql["problem"] == ""
    fields = {field["name"]: field for field in sql["fields"]}
    assert fields["max_turns"]["type"] == "int"
    assert all(set(field) == {"name", "type", "required", "default", "doc"} for field in sql["fields"])


def test_engines_agents_and_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(listed("engines", capsys)) == set(ENGINES)
    assert listed("agents", capsys)["chat"]["target"] == "stepgym.run.agent:ChatAgent"
    algorithms = listed("algorithms", capsys)
    assert set(CREDITS) <= set(algorithms)
    assert {entry["kind"] for entry in algorithms.values()} >= {"credit", "loss"}
    sinks = listed("sinks", capsys)
    assert {"tensorboard", "trackio", "wandb"} <= set(sinks)
    assert {"project", "mode"} <= {field["name"] for field in sinks["wandb"]["fields"]}


@pytest.mark.parametrize("kind", list(Kind))
def test_the_text_names_everything_that_the_json_names(kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", kind]) == 0
    text = capsys.readouterr().out
    for entry in entries_of(kind):
        assert f"{entry.name}  ({entry.kind}, {entry.target})" in text
        assert all(f"    {field.name}: " in text for field in entry.fields)


def test_what_cannot_be_imported_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    CREDITS.register("broken-for-test", "no_such_module_x:thing")
    try:
        assert run(["list", "algorithms"]) == 0
        text = capsys.readouterr().out
    finally:
        del CREDITS._entries["broken-for-test"]
    assert "cannot be used: credit 'broken-for-test': there is no module 'no_such_module_x'" in text


def test_an_unknown_kind_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "models"]) == 2
    error = capsys.readouterr().err
    assert "'models' is not one of" in error
    assert "algorithms" in error
