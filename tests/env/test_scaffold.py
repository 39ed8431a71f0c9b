from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stepgym.env.scaffold import write_package
from stepgym.errors import UserError


@pytest.mark.parametrize("name", ["number-guess", "maze2", "my_long_name"])
def test_the_package_passes_its_own_test(name: str, tmp_path: Path) -> None:
    root = write_package(name, tmp_path / "new")
    assert root == tmp_path / "new" / name
    module = name.replace("-", "_")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["name"] == name
    assert list(project["entry-points"]["stepgym.envs"]) == [f"{name}-v0"]
    assert not [path for path in root.rglob("*") if path.is_file() and "@" in path.read_text().replace("@tool", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert (root / module / "py.typed").exists()


def test_the_package_is_clean_by_our_own_rules(tmp_path: Path) -> None:
    root = write_package("number-guess", tmp_path)
    for tool in (
        ["ruff", "check", "--line-length", "120", "--select", "E,F,I,UP,B,SIM,N", "."],
        ["ruff", "format", "--check", "--line-length", "120", "."],
    ):
        done = subprocess.run([sys.executable, "-m", *tool], cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "will not do"),
        ("Number", "will not do"),
        ("2fast", "will not do"),
        ("a--b", "will not do"),
        ("../evil", "will not do"),
        ("naïve", "will not do"),
        ("with space", "will not do"),
        ("class", "a word or a module of Python's own"),
        ("match", "a word or a module of Python's own"),
        ("json", "a word or a module of Python's own"),
        ("numpy", "a module 'numpy' is installed already"),
        ("stepgym", "a module 'stepgym' is installed already"),
        ("sql", "an environment 'sql' is installed already"),
    ],
)
def test_bad_names_are_refused_and_nothing_is_written(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        write_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "number-guess").mkdir()
    (tmp_path / "number-guess" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already; nothing was written"):
        write_package("number-guess", tmp_path)
    assert [path.name for path in (tmp_path / "number-guess").iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_written_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        write_package("number-guess", tmp_path / "file")
