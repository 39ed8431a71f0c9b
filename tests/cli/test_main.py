from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepgym.cli.main import VERBS, run
from stepgym.errors import EngineError, UserError
from stepgym.plugins import Registry

_PLUGIN = '''
import os, signal, time
import typer
from stepgym.errors import EngineError, UserError

def greet(how: str = typer.Argument("kindly")) -> None:
    """Greet in one of several ways."""
    if how == "user":
        raise UserError("no such greeting: 'user'\\n  give another")
    if how == "engine":
        raise EngineError("the server refuses")
    if how == "bug":
        raise ZeroDivisionError("division by zero")
    if how == "gate":
        raise typer.Exit(1)
    if how == "incomplete":
        raise typer.Exit(3)
    if how == "exit":
        raise SystemExit(4)
    if how == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    if how == "long":
        for number in range(100_000):
            print(number)
    print("hello")

group = typer.Typer()

@group.command()
def install(what: str) -> None:
    """Install something."""
    print("installing", what)

@group.command()
def remove(what: str) -> None:
    """Remove something."""
    print("removing", what)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a process in which a distribution with two verbs is installed."""
    info = tmp_path / "greetings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stepgym.commands]\ngreet = greetings:greet\nparts = greetings:group\n")
    (tmp_path / "greetings.py").write_text(_PLUGIN)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "STEPGYM_DEBUG": ""}


def stepgym(plugin: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepgym.cli.main", *arguments], env=plugin, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["greet"], 0, ""),
        (["greet", "user"], 2, "error: no such greeting: 'user' give another\n"),
        (["greet", "engine"], 1, "error: the server refuses\n"),
        (["greet", "gate"], 1, ""),
        (["greet", "incomplete"], 3, ""),
        (["greet", "exit"], 4, ""),
        (
            ["greet", "bug"],
            1,
            "internal error: ZeroDivisionError: division by zero (run again with --debug for the traceback)\n",
        ),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(
    plugin: dict[str, str], arguments: list[str], code: int, error: str
) -> None:
    done = stepgym(plugin, *arguments)
    assert (done.returncode, done.stderr) == (code, error)
    assert done.stdout == ("hello\n" if not error and code == 0 else "")


@pytest.mark.parametrize(("arguments", "debug"), [(["greet", "user", "--debug"], ""), (["greet", "user"], "1")])
def test_debug_shows_the_traceback(plugin: dict[str, str], arguments: list[str], debug: str) -> None:
    done = stepgym({**plugin, "STEPGYM_DEBUG": debug}, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "UserError: no such greeting" in done.stderr


def test_debug_behind_two_dashes_is_an_argument(plugin: dict[str, str]) -> None:
    assert stepgym(plugin, "greet", "--", "--debug").stdout == "hello\n"


def test_plugins_add_verbs_and_groups_of_verbs(plugin: dict[str, str]) -> None:
    listing = stepgym(plugin, "--help")
    assert listing.returncode == 0
    assert "Added by greetings." in listing.stdout
    assert "Greet in one of several ways." in stepgym(plugin, "greet", "--help").stdout
    assert stepgym(plugin, "parts", "install", "x").stdout == "installing x\n"


def test_an_interrupt_exits_with_130_and_no_traceback(plugin: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stepgym.cli.main", "greet", "wait"],
        env=plugin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_a_reader_that_goes_away_is_no_error(plugin: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stepgym.cli.main", "greet", "long"],
        env=plugin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
    process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["lst"],
            "error: unknown command 'lst'; did you mean 'list'? Known: audit, check-env, engines, eval, list, new-env, "
            "replay, rollout, serve-retriever, show, train",
        ),
        (["--nonsense"], "error: No such option: --nonsense (see 'stepgym --help')"),
        (["list"], "error: Missing argument 'kind'"),
        (["list", "envs", "--jsn"], "error: No such option: --jsn"),
        (["list", "envs", "more"], "error: Got unexpected extra argument"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(error)
    assert captured.err.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    bare = capsys.readouterr().out
    assert run(["--help"]) == 0
    assert capsys.readouterr().out == bare
    assert all(f"  {verb} " in bare for verb in VERBS)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("stepgym 0.")


@pytest.mark.parametrize("verb", ["check-env", "eval", "list", "new-env", "rollout", "train"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert f"Usage: stepgym {verb}" in capsys.readouterr().out


def test_help_imports_no_verb_and_nothing_heavy() -> None:
    code = """
import sys
from stepgym.cli.main import run
run(["--help"])
verbs = {f"stepgym.cli.{name}" for name in ("check_env", "eval", "list", "new_env", "rollout", "train")}
print(sorted(sys.modules.keys() & (verbs | {"torch", "transformers", "pydantic", "datasets", "rich"})), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_errors_of_the_library_carry_their_exit_code() -> None:
    assert (UserError("x").exit_code, EngineError("x").exit_code) == (2, 1)
    assert isinstance(VERBS, Registry)
