"""A small game, a recipe for it, and one trained run that the tests of the verbs share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GAMES = Path(__file__).resolve().parents[1] / "games"
RECIPE = """\
env: {kind: "colours:Colours"}
model: {kind: tiny, vocab_size: 320, layers: 1, width: 64, heads: 2, context_length: 160, corpus_tasks: 48}
rollout: {samples: 4, concurrency: 16, max_response_tokens: 8}
warm_start:
  tasks: 48
  expert: {mistakes: 0.3}
  sft: {updates: 40, batch_size: 16, optimizer: {learning_rate: 5.0e-3, warmup_updates: 2}}
algorithm: {optimizer: {learning_rate: 2.0e-3}}
budget: {iterations: 3, tasks_per_iteration: 4}
evaluation: {every: 2, validation_tasks: 8, test_tasks: 12, greedy: true}
checkpoint: {every: 2}
threads: 1
"""


@dataclass(frozen=True)
class Answer:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True, scope="session")
def games() -> Iterator[Path]:
    """The folder of the games, importable here."""
    sys.path.insert(0, str(GAMES))
    yield GAMES
    sys.path.remove(str(GAMES))


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's file."""
    path = tmp_path_factory.mktemp("colours") / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def stepgym(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs the command line in this process."""
    import torch

    from stepgym.cli.main import run

    torch.set_num_threads(1)

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Environment variables for a process that shall find the games."""
    return {**os.environ, "PYTHONPATH": str(GAMES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, recipe: Path, environment: dict[str, str]) -> Path:
    """The folder of a run that was trained by the command, from its start to its end."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    command = [sys.executable, "-m", "stepgym.cli.main", "train", str(recipe), "--out", str(folder), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder.parent / "stdout").write_text(done.stdout)
    (folder.parent / "stderr").write_text(done.stderr)
    return folder
