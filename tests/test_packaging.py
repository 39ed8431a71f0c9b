"""The distribution as people install it: the wheel, its entry points, and an import that loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVS = ("stepgym_search", "stepgym_sql")
HEAVY = ("torch", "transformers", "vllm", "datasets", "pyarrow", "matplotlib", "openai", "pandas")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, which is built from the clone."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel in it, and nothing else of ours.

    The packages that ours depends on are not installed a second time: they are found where they are. A folder that is
    named in a `.pth` file is searched last and its own `.pth` files are not read, so the editable clone stays out.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"stepgym-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"stepgym", *ENVS, info}
    typed = [f"{package}/py.typed" for package in ("stepgym", *ENVS)]
    for needed in (*typed, f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"):
        assert needed in names
    modules = {name for name in names if name.endswith(".py")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "stepgym").rglob("*.py")}
    sources |= {str(path.relative_to(ROOT / "envs")) for path in (ROOT / "envs").rglob("*.py")}
    assert modules == sources


def test_the_wheel_works_outside_the_clone(python: Path, tmp_path: Path) -> None:
    packages = ", ".join(("stepgym", *ENVS))
    code = f"import json, {packages}; print(json.dumps([package.__file__ for package in ({packages})]))"
    for place in json.loads(run(python, "-c", code, cwd=tmp_path)):
        assert Path(place).is_relative_to(python.parents[1]), f"{place} is not the installed one"


def test_every_exported_name_can_be_imported_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = "import stepgym; print(all(getattr(stepgym, name) is not None for name in stepgym.__all__))"
    assert run(python, "-c", code, cwd=tmp_path).split() == ["True"]


def test_the_entry_points_of_the_wheel_load(python: Path, tmp_path: Path) -> None:
    code = """
from importlib.metadata import distribution
import gymnasium
for entry in distribution("stepgym").entry_points:
    print(entry.group, entry.name, entry.load().__name__)
for env in ("search", "sql"):
    print(gymnasium.make(f"stepgym:stepgym/{env}-v0").unwrapped.spec.id)
"""
    lines = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert "console_scripts stepgym main" in lines
    assert "stepgym.envs stepgym/sql-v0 SQLEnv" in lines
    assert "stepgym.envs stepgym/search-v0 SearchEnv" in lines
    assert "stepgym.commands serve-retriever serve_retriever" in lines
    assert lines[-2:] == ["stepgym/search-v0", "stepgym/sql-v0"]


def test_the_command_of_the_wheel_runs(python: Path, tmp_path: Path) -> None:
    assert "check-env" in run(python.parent / "stepgym", "--help", cwd=tmp_path)
    listed = json.loads(run(python.parent / "stepgym", "list", "envs", "--json", cwd=tmp_path))
    assert {"stepgym/search-v0", "stepgym/sql-v0"} <= {entry["name"] for entry in listed}


def test_import_stepgym_registers_the_environments_and_loads_nothing_heavy() -> None:
    code = f"""
import json, sys, stepgym
loaded = [name for name in {HEAVY!r} if name in sys.modules]
envs = [name for name in sys.modules if name.startswith("stepgym_")]
import gymnasium
print(json.dumps([loaded, envs, "stepgym/sql-v0" in gymnasium.registry]))
"""
    assert json.loads(run(sys.executable, "-c", code, cwd=ROOT)) == [[], [], True]


@pytest.mark.parametrize(
    "module",
    [
        "stepgym.cli.main",
        "stepgym.env.tool_env",
        "stepgym.run.statistics",
        "stepgym.cli.tables",
        "stepgym_search.env",
        "stepgym_search.server.command",
        "stepgym_sql.env",
    ],
)
def test_evaluating_and_writing_environments_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"


def test_folders_that_are_not_packages_have_no_init_file() -> None:
    """The PyPI package `openai-agents` owns the import name `agents`, and the others would be as easily taken."""
    for folder in ("envs", "agents", "recipes", "docs", "benchmarks"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_version_is_said_once_and_the_same_everywhere() -> None:
    import stepgym

    assert stepgym.__version__ == PROJECT["version"]


def test_every_requirement_is_pinned_in_the_constraints_and_torch_exactly() -> None:
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}
    assert all(str(pin.specifier).startswith("==") and pin.url is None for pin in pins.values())
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name != "stepgym":
            pin = pins.get(canonicalize_name(requirement.name))
            assert pin is not None, f"constraints.txt does not pin {requirement.name}"
            (exact,) = (specifier.version for specifier in pin.specifier)
            assert exact in requirement.specifier, f"constraints.txt pins {pin}, pyproject.toml wants {requirement}"
    assert str(pins["torch"]) == "torch==2.13.0"
