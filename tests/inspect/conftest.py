"""Episodes to replay; see tests/games/replayed.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepgym.model.engines.base import Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.store import TrajectoryStore
from stepgym.run.rollouts import RolloutConfig, rollout


@pytest.fixture(scope="session")
def games() -> Any:
    """The helper module; tests are no package, so it is loaded by its path."""
    path = Path(__file__).resolve().parents[1] / "games" / "replayed.py"
    spec = importlib.util.spec_from_file_location("stepgym_test_games_replayed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stepgym_test_games_replayed"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def moods(games: Any) -> Iterator[dict[str, Any]]:
    """What the environments do otherwise than when they were recorded; nothing at first."""
    games.moods.clear()
    yield games.moods
    games.moods.clear()


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    texts = [f'{{"name": "guess", "arguments": {{"number": {n}}}}} Throw. It fell far. Done.' for n in range(101)]
    return Renderer(build_tiny_tokenizer(texts * 3))


@pytest.fixture
def record(games: Any, renderer: Renderer, moods: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Play into a store and return its folder."""

    def play(env: Any, engine: Engine | None = None, **options: Any) -> Path:
        config = options.pop("config", RolloutConfig(samples=2, max_response_tokens=200))
        options.setdefault("policy", OutcomePolicy(max_infrastructure_share=1.0))
        if engine is None:
            options["expert"] = {}
        with TrajectoryStore(tmp_path / "store", "a") as store:
            rollout(env, games.TASKS, engine, renderer=renderer, config=config, store=store, **options)
        return tmp_path / "store"

    return play
