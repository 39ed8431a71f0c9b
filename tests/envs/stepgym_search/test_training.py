"""Training with a retrieval server that dies: the run stops with one line, and goes on when the server is back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from stepgym_search.corpus import open_corpus
from stepgym_search.encyclopedia import EncyclopediaConfig, encyclopedia_file
from stepgym_search.env import SearchEnv
from stepgym_search.retrievers.bm25 import BM25Retriever
from stepgym_search.server.app import create_app

from stepgym.cli.main import run
from stepgym.env.shared import close_shared
from stepgym.record.outcome import Outcome
from stepgym.record.store import TrajectoryStore
from stepgym.run.folder import run_folder
from stepgym.run.rollouts import RunStoppedError
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.loop import TrainingResult, train
from stepgym.train.observer import Observer
from stepgym.train.recipe import Recipe, check_recipe

TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
ENV = {"kind": "search", "articles": 200, "kinds": ["one_hop"], "topk": 1, "max_turns": 2}
RECIPE: dict[str, Any] = {
    "env": {**ENV, "instructions": "none", "observation_format": "brief", "wording": "plain", "names": "short"},
    "model": {
        "kind": "tiny",
        "vocab_size": 320,
        "layers": 1,
        "width": 64,
        "heads": 2,
        "context_length": 384,
        "corpus_tasks": 16,
        "special_tokens": TAGS,
    },
    "rollout": {"samples": 2, "max_response_tokens": 24},
    "warm_start": {
        "tasks": 16,
        "sft": {"updates": 80, "batch_size": 8, "optimizer": {"learning_rate": 5e-3, "warmup_updates": 2}},
    },
    "budget": {"iterations": 3, "tasks_per_iteration": 4},
    "evaluation": {"every": 0, "test_tasks": 0},
    "checkpoint": {"every": 1, "keep": 2},
    "threads": 1,
}


@pytest.fixture(autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SearchEnv)


@pytest.fixture
def serve(serve_app: Callable[..., Any]) -> Callable[..., Any]:
    """`serve(port=0)` serves the generated encyclopedia."""
    config = EncyclopediaConfig(articles=200, kinds=["one_hop"], wording="plain", names="short")
    corpus = open_corpus(encyclopedia_file(config))
    return lambda port=0: serve_app(create_app(BM25Retriever(corpus)), port)


def recipe_for(url: str, **changes: Any) -> Recipe:
    retriever = {"kind": "http", "url": url, "retries": 0, "timeout": 5.0}
    return check_recipe({**RECIPE, "env": {**RECIPE["env"], "retriever": retriever}, **changes}, Path("x.yaml"))


def play(recipe: Recipe, path: Path, observer: Observer | None = None) -> TrainingResult:
    with run_folder(path, config=recipe.model_dump(mode="json"), digest=recipe.digest) as folder:
        return train(recipe, folder, observer)


class Killer(Observer):
    """Ends the server after an iteration."""

    def __init__(self, server: Any, after: int) -> None:
        self.server, self.after = server, after

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        if number == self.after:
            self.server.stop()


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_server_that_dies_stops_the_run_which_goes_on_when_it_is_back(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    server = serve()
    recipe = recipe_for(server.url)
    with pytest.raises(RunStoppedError) as stopped:
        play(recipe, tmp_path, Killer(server, after=1))
    line = str(stopped.value)
    assert line.startswith("3 of the 8 episodes of train 2 failed by environment or infrastructure")
    assert f"env_error: {server.url}/retrieve cannot be reached" in line
    assert "\n" not in line
    assert stopped.value.exit_code == 3
    assert [row["iteration"] for row in metrics(tmp_path)] == [0, 1]
    latest = CheckpointStore(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert latest.extra["iteration"] == 1
    assert not (tmp_path / "summary.json").exists()

    serve(urlsplit(server.url).port)
    result = play(recipe, tmp_path)
    assert result.iterations == 3
    assert [row["iteration"] for row in metrics(tmp_path)] == [0, 1, 2, 3]
    assert "env_error" not in result.outcomes
    with TrajectoryStore(tmp_path / "trajectories") as store:
        finals = [each for each in store.ids(final_only=True) if each.phase == "train"]
        failed = [t for t in store.read(phase="train", iteration=2) if not t.final]
    assert Counter(each.iteration for each in finals) == {1: 8, 2: 8, 3: 8}
    assert len({(each.iteration, each.task_id, each.sample) for each in finals}) == 24
    assert len(failed) >= 3 * 3
    assert {t.outcome for t in failed} == {Outcome.ENV_ERROR}


def test_the_command_says_in_one_line_what_is_gone_and_how_to_go_on(
    serve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    server, file, out = serve(), tmp_path / "recipe.json", tmp_path / "run"
    server.stop()
    file.write_text(json.dumps(recipe_for(server.url, budget={"iterations": 0}).model_dump(mode="json")))
    command = ["train", str(file), "--out", str(out)]
    assert run(command) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert f"stopped; go on with: stepgym train {file} --out {out}" in captured.err
    (error,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: 5 of the 16 episodes of expert 0 failed by environment or infrastructure")
    assert f"env_error: {server.url}/retrieve cannot be reached" in error
    assert CheckpointStore(out / "checkpoints").latest() is None

    serve(urlsplit(server.url).port)
    assert run(command) == 0, capsys.readouterr().err
    assert metrics(out)[0]["warm_start"]["trajectories"] == 16
