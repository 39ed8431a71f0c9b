"""What the documentation shows runs: Python blocks from top to bottom, commands against the command line itself."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from stepgym.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("console", "bash", "sh", "shell")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: its language, its text, and the line it starts at."""

    page: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1] in languages:
                found.append(Block(page, match[1], match[2], text.count("\n", 0, match.start(2)) + 1))
    return found


def as_module(page: Path) -> str:
    """The page's Python blocks as one module in which every line has the number that it has on the page."""
    lines = [""] * (page.read_text().count("\n") + 1)
    for block in blocks("python"):
        if block.page == page:
            for offset, line in enumerate(block.text.splitlines()):
                lines[block.line - 1 + offset] = line
    return "\n".join(lines) + "\n"


def commands() -> list[tuple[Block, str]]:
    """Every command of the shell blocks: in `console` blocks what follows a `$`, else each line."""
    found = []
    for block in blocks(*SHELLS):
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            prompted = re.match(r"\s*\$ (.*)", line)
            if prompted or (block.language != "console" and line.strip() and not line.lstrip().startswith("#")):
                command = prompted[1] if prompted else line
                found += [(block, part.strip()) for part in re.split(r"&&|\|\||;|\|", command)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    module = as_module(page)
    if not module.strip():
        pytest.skip("no Python on this page")
    (tmp_path / "page.py").write_text(module)
    # As a module and not as a script: what is defined on the page can then be found by name.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import page"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{page.name} (line numbers are those of the page)\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("block", "command"), commands(), ids=lambda value: str(value)[:60])
def test_the_commands_of_a_page_exist(block: Block, command: str) -> None:
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]  # a variable that is set for the command
    if words and words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        for target in targets:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"{block}: no target {target!r}"
    elif words and Path(words[0]).name == "stepgym":
        check_arguments(block, words[1:])
    for word in words:
        if re.match(r"(recipes|docs|envs|benchmarks|tests|stepgym)/", word):
            assert (ROOT / word).exists(), f"{block}: there is no {word}"


def check_arguments(block: Block, arguments: list[str]) -> None:
    """Parse a command as the command line would, and do not run it."""
    group: Any = typer.main.get_group(app)
    if not arguments or arguments[0].startswith("-"):
        assert not arguments or arguments[0] in ("--help", "--version", "--debug"), f"{block}: {arguments}"
        return
    context = group.make_context("stepgym", ["--help"], resilient_parsing=True)
    name, verb, rest = group.resolve_command(context, arguments)
    rest = [word for word in rest if word != "--help"]
    try:
        verb.make_context(name, rest, parent=context)
    except Exception as error:
        pytest.fail(f"{block}: stepgym {shlex.join(arguments)}: {error}")


@pytest.mark.parametrize("block", blocks("yaml", "json", "toml"), ids=str)
def test_the_data_of_a_page_can_be_read(block: Block) -> None:
    if block.language == "toml":
        assert tomllib.loads(block.text)
    elif block.language == "json":
        assert loads(block.text)
    else:
        assert YAML(typ="safe").load(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, f"{page.name} links to {target}"


def test_every_fence_names_its_language() -> None:
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        assert len(fences) % 2 == 0, f"{page.name}: a fence is not closed"
        assert all(fences[::2]), f"{page.name}: a fence names no language (use `text`)"


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    said = "\n".join(
        text for room in ("stepgym", "envs") for path in (ROOT / room).rglob("*.py") for text in texts(path)
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### (.*)$", page.split("## Messages", 1)[1], re.MULTILINE)
    assert len(quoted) > 5
    for message in quoted:
        assert message.strip("… ") in said, f"troubleshooting.md quotes {message!r}, which nothing says"


def texts(path: Path) -> list[str]:
    """The texts in a module; what an f-string fills in is written as `…`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found
