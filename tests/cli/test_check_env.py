from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepgym.cli.main import run

_MODULE = '''
from stepgym import Task, ToolEnv, tool
from stepgym.env.messages import tool_call

class Fine(ToolEnv):
    def __init__(self, *, size: int = 2):
        self.size = size
    def tasks(self, split):
        return [Task(id=f"{split}{n}", prompt="Press.") for n in range(self.size)]
    def begin(self, task):
        self.pressed = False
        return task.prompt
    @tool
    def press(self) -> str:
        """Press the button."""
        self.pressed = True
        self.finish()
        return "pressed"
    def score(self):
        return float(self.pressed)
    def expert(self, task):
        yield tool_call("press")

class Broken(Fine):
    def score(self):
        return 2.0
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_checked_env.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_good_environment_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-env", "my_checked_env:Fine", "size=3"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "my_checked_env:Fine: all checks passed"
    assert "train 3, validation 3, test 3" in captured.out
    assert "checking garbage ..." in captured.err


def test_a_broken_one_exits_with_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-env", "my_checked_env:Broken", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert any("outside of reward_range" in finding["message"] for finding in report["findings"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["my_checked_env:Fine", "sise=3"], "error: Fine: unknown field 'sise'; did you mean 'size'? Known: size\n"),
        (["my_checked_env:Fine", "size=many"], "error: Fine.size: expected an integer, got 'many'\n"),
        (["my_checked_env:Fine", "size"], "error: override 'size': expected name=value or section.name=value\n"),
        (
            ["my_checked_env:Fin"],
            "error: environment 'my_checked_env:Fin': 'my_checked_env' has no 'Fin'; did you mean",
        ),
    ],
)
def test_bad_input_exits_with_2(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-env", *arguments]) == 2
    assert capsys.readouterr().err.startswith(error)
