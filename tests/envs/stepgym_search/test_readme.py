from __future__ import annotations

import re
from pathlib import Path

import pytest
from stepgym_search.env import SearchEnv
from stepgym_search.retrievers import RETRIEVERS

from stepgym.config import describe
from stepgym.env.shared import close_shared

README = Path(__file__).parents[3] / "envs" / "stepgym_search" / "README.md"


def test_its_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (said,) = re.findall(r"print\(.*\)  # (.*)", block)
    exec(compile(block, str(README), "exec"), {})
    close_shared(SearchEnv)
    assert capsys.readouterr().out == f"{said}\n"


def shown(default: object) -> set[str]:
    if default is None:
        return {"none", "all"}
    return {
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:g}"
        if isinstance(default, float)
        else f"{default}"
    }


def test_it_names_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", README.read_text(), re.MULTILINE)
    documented = {name: default for names, default in rows for name in re.findall(r"\w+", names)}
    for field in describe(SearchEnv):
        assert documented[field.name].strip("`").split(" ")[0] in shown(field.default), field.name


def test_it_names_every_retriever() -> None:
    assert all(f"| `{name}` |" in README.read_text() for name in RETRIEVERS.names())
