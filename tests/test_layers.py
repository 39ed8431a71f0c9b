"""The rules of the house: nothing imports upward, one noun per file, names that cannot shadow each other."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "stepgym").rglob("*.py"))
SOURCES = LIBRARY + sorted(path for room in ("envs", "agents", "benchmarks") for path in (ROOT / room).rglob("*.py"))
MAX_LINES = 450
TALKING = {"print", "input", "breakpoint"}


def lint_imports(*options: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache", *map(str, options)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_nothing_imports_upward() -> None:
    done = lint_imports()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_contract_would_notice_an_upward_import(tmp_path: Path) -> None:
    """The same contracts over a copy of the tree in which the lowest room imports the highest one."""
    for name in ("stepgym", "envs"):
        for path in (ROOT / name).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT / "envs" if name == "envs" else ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    with (tmp_path / "stepgym" / "errors.py").open("a") as file:
        file.write("\nimport stepgym.train\n")
    done = lint_imports("--config", tmp_path / "pyproject.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert "stepgym.errors -> stepgym.train" in done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_noun_and_short(path: Path) -> None:
    # torch's compiler skips every module named tree.py.
    assert path.name not in ("utils.py", "util.py", "helpers.py", "misc.py", "tree.py")
    lines = path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it by its nouns"


def test_modules_import_from_where_a_name_lives() -> None:
    """Through `stepgym` itself, whose exports are lazy, the import rules would see nothing."""
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                names = {alias.name for alias in node.names}
                assert node.module != "stepgym" or names == {"__version__"}, f"{path}:{node.lineno}: {names}"


def test_the_library_never_prints() -> None:
    for path in LIBRARY:
        if path.is_relative_to(ROOT / "stepgym" / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in TALKING, f"{path}:{node.lineno} calls {node.func.id}()"


def test_nothing_is_ever_unpickled() -> None:
    # What the processes of one run tell each other is pickled by torch.distributed; it never comes from a file.
    told = ROOT / "stepgym" / "train" / "parallel" / "processes.py"
    for path in (source for source in SOURCES if source != told):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "cloudpickle"} & set(names), f"{path}:{node.lineno}"  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("weights_only") == "True", f"{path}:{node.lineno}: torch.load(weights_only=True)"


def test_no_exported_name_equals_a_submodules_name() -> None:
    """A lazily exported function whose name equals its submodule's is shadowed by the module."""
    packages = [
        "stepgym",
        *(each.name for each in pkgutil.walk_packages([str(ROOT / "stepgym")], "stepgym.") if each.ispkg),
    ]
    assert len(packages) > 5
    for name in packages:
        package = importlib.import_module(name)
        submodules = {each.name for each in pkgutil.iter_modules(package.__path__)}
        exported = set(getattr(package, "__all__", ())) | set(getattr(package, "_HOMES", ()))
        assert not exported & submodules, f"{name} exports {exported & submodules}, which are submodules too"


def test_the_lazy_exports_are_the_ones_that_type_checkers_see() -> None:
    import stepgym

    tree = ast.parse((ROOT / "stepgym" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == stepgym._HOMES
    assert sorted(seen) == sorted(stepgym.__all__)


def test_every_library_module_says_what_it_is_and_postpones_annotations() -> None:
    for path in LIBRARY:
        tree = ast.parse(path.read_text())
        if not tree.body:
            continue
        assert ast.get_docstring(tree), f"{path} has no docstring"
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        only_docstring = len(tree.body) == 1
        assert imports or only_docstring, f"{path} lacks `from __future__ import annotations`"


def test_the_hooks_run_what_ci_runs() -> None:
    config = YAML(typ="safe").load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}, "a hook from elsewhere would be downloaded"
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    recipes = subprocess.run(
        ["make", "--dry-run", "--always-make", "lint", "types", "imports"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    checks = [line for line in recipes.stdout.splitlines() if re.match(r"\.venv/bin/(ruff|mypy|lint-imports)", line)]
    assert sorted(hooks) == sorted(checks)
    script = (ROOT / ".ci" / "run").read_text()
    called = [shlex.split(line) for line in re.findall(r"make --no-print-directory (.*)", script)]
    assert [words[0] for words in called] == ["lint", "types", "imports", "test", "quickstart"]


def test_nothing_of_the_machine_it_was_written_on_is_in_the_repository() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a clone")
    here = f"{ROOT}/".encode()
    for name in filter(None, tracked.stdout.split("\0")):
        path = ROOT / name
        if not path.exists() or path == Path(__file__).resolve():
            continue
        assert path.stat().st_size < 2_000_000, f"{name} is too large for a repository"
        assert path.suffix not in (".safetensors", ".pt", ".bin", ".parquet", ".sqlite", ".db"), f"{name} is data"
        found = re.search(rb"/(root|home|Users|tmp)/[\w.-]+/", path.read_bytes().replace(here, b"/root/clone/"))
        assert not found, f"{name} holds a path of a machine: {found.group()!r}"  # type: ignore[union-attr]


def test_measured_results_are_json_and_name_their_hardware() -> None:
    for path in (ROOT / "benchmarks").glob("results/*.json"):
        assert isinstance(json.loads(path.read_text()), dict | list), path
