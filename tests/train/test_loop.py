"""The training loop in process: the order of its stages, its tasks, its checkpoints, and what it passes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from coin import RECIPE, WARM, Coin, closed

from stepgym.errors import UserError
from stepgym.record.store import TrajectoryStore
from stepgym.run.folder import RunFolder, run_folder
from stepgym.run.rollouts import RunStoppedError
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.loop import check_training, train
from stepgym.train.observer import Observer
from stepgym.train.recipe import Recipe, check_recipe
from stepgym.train.result import TrainingResult


class Witness(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.iterations: list[int] = []
        self.done: dict[str, int] = {}

    def stage(self, name: str, total: int | None) -> None:
        self.stages.append((name, total))

    def advance(self, done: int, numbers: Mapping[str, float]) -> None:
        self.done[self.stages[-1][0]] = done

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        self.iterations.append(number)


def made(**changes: Any) -> Recipe:
    fields = {name: {**RECIPE.get(name, {}), **v} if isinstance(v, dict) else v for name, v in changes.items()}
    return check_recipe({**RECIPE, **fields}, Path("x.yaml"))


def play(recipe: Recipe, path: Path, observer: Observer | None = None) -> TrainingResult:
    with run_folder(path, config=recipe.model_dump(mode="json"), digest=recipe.digest) as folder:
        return train(recipe, folder, observer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingResult, Witness]:
    import torch

    torch.set_num_threads(1)
    path, witness = tmp_path_factory.mktemp("loop") / "run", Witness()
    closed.clear()
    return path, play(made(), path, witness), witness


def test_it_learns(run: tuple[Path, TrainingResult, Witness]) -> None:
    path, result, _ = run
    assert result.success_before is not None
    assert result.success_after is not None
    rewards = [row["reward_mean"] for row in metrics(path)[1:]]
    assert sum(rewards[2:]) > sum(rewards[:2])  # heads comes more and more
    assert closed == ["shelf"]


def test_the_stages_come_in_order(run: tuple[Path, TrainingResult, Witness]) -> None:
    path, result, witness = run
    assert witness.stages == [
        ("model", None),
        ("expert", 16),
        ("warm start", 25),
        ("test", 6),
        ("rollout 1", 16),
        ("rollout 2", 16),
        ("validation", 4),
        ("rollout 3", 16),
        ("rollout 4", 16),
        ("validation", 4),
        ("test", 6),
    ]
    assert all(witness.done[name] == total for name, total in witness.stages if total)
    assert witness.iterations == [1, 2, 3, 4]
    stages = {"model", "expert", "warm_start", "engine", "sync", "evaluation", "rollout", "update", "checkpoint"}
    assert set(result.seconds) == stages
    assert json.loads((path / "summary.json").read_text()) == json.loads(json.dumps(result.to_dict()))


def test_every_step_knows_its_weights(run: tuple[Path, TrainingResult, Witness]) -> None:
    path, _, _ = run
    updates = {row["iteration"]: row["update"] for row in metrics(path)[1:]}
    with TrajectoryStore(path / "trajectories") as store:
        for trajectory in store.read(phase="train"):
            before = updates.get(trajectory.id.iteration - 1, 0)
            for step in trajectory.steps:
                assert [span[0] for span in step.weights_versions] == [str(before)]
            assert trajectory.provenance["recipe"] == made().digest


def test_tasks_follow_those_of_the_warm_start_and_then_come_in_seeded_order(
    run: tuple[Path, TrainingResult, Witness], tmp_path: Path
) -> None:
    path, _, _ = run
    with TrajectoryStore(path / "trajectories") as store:
        numbers = {
            i: sorted({int(t.id.task_id[6:]) for t in store.read(phase="train", iteration=i)}) for i in range(1, 5)
        }
    assert numbers == {i: list(range(12 + 4 * i, 16 + 4 * i)) for i in range(1, 5)}
    recipe = made(
        warm_start={**WARM, "tasks": 36, "sft": {"updates": 1}},
        budget={"iterations": 5, "tasks_per_iteration": 20},
        evaluation={"every": 0, "test_tasks": 0},
        rollout={"samples": 1, "max_response_tokens": 10},
    )
    play(recipe, tmp_path)
    with TrajectoryStore(tmp_path / "trajectories") as store:
        drawn = [{t.id.task_id for t in store.read(phase="train", iteration=i)} for i in range(1, 6)]
    assert all(len(tasks) == 20 for tasks in drawn)
    assert not drawn[0] & drawn[1]  # a pass takes every task once
    assert not drawn[2] & drawn[3]
    assert drawn[0] not in (drawn[2], drawn[3])  # the next one in another order


def test_the_best_checkpoint_is_kept_and_reported(run: tuple[Path, TrainingResult, Witness]) -> None:
    path, result, _ = run
    scores = {row["iteration"]: row["validation_success"] for row in metrics(path)[1:] if "validation_success" in row}
    assert set(scores) == {2, 4}
    best = max(scores, key=lambda iteration: (scores[iteration], iteration))
    kept = CheckpointStore(path / "checkpoints").best()
    assert kept is not None
    assert (result.best_iteration, kept.extra["iteration"], kept.score) == (best, best, scores[best])
    assert result.model == str(kept.model_path)
    assert result.updates == kept.update
    with TrajectoryStore(path / "trajectories") as store:
        assert len(store.table(["id"], phase="test", iteration=best)) == 6


def test_what_cannot_be_trained_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for changes, message in (
        ({"sampling": {"top_p": 0.9}}, "top_p = 0.9"),
        ({"policy": {"device": "cpu", "dtyp": 1}}, "did you mean 'dtype'"),
        ({"engine": {"kind": "openai", "base_url": "http://h/v1"}}, "engine.kind"),
        ({"warm_start": {**WARM, "sft": {"updates": 0}}}, "warm_start.sft.updates"),
    ):
        with pytest.raises(UserError, match=message):
            check_training(made(**changes))
    check_training(made(sampling={"top_p": 0.9}, budget={"iterations": 0}))
    check_training(made(sampling={"top_p": 0.9}, algorithm={"correction": "none"}))
    with pytest.raises(UserError, match="40 tasks, fewer than 41"):
        play(made(budget={"iterations": 1, "tasks_per_iteration": 41}), tmp_path)
    assert not (tmp_path / "trajectories").exists()


class Interrupted(Witness):
    """Leaves after two iterations."""

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        super().iteration(number, metrics)
        if number == 2:
            raise KeyboardInterrupt


def test_an_adapter_is_trained_on_a_pretrained_model_and_resumed(
    run: tuple[Path, TrainingResult, Witness], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    _, before, _ = run
    fields: dict[str, Any] = {
        **RECIPE,
        "model": {"kind": "pretrained", "path": before.model},
        "policy": {"lora": {"rank": 4}},
        "algorithm": {"optimizer": {"learning_rate": 5e-3, "warmup_updates": 2}},
        "checkpoint": {"every": 1},
        "warm_start": None,
        "evaluation": {"every": 0, "test_tasks": 6},
    }
    recipe = check_recipe(fields, Path("x.yaml"))
    whole = play(recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        play(recipe, tmp_path / "parts", Interrupted())
    parts = play(recipe, tmp_path / "parts")
    assert [row["iteration"] for row in metrics(tmp_path / "parts")] == [1, 2, 3, 4]
    assert (parts.updates, parts.success_after) == (whole.updates, whole.success_after)
    one, two = (
        load_file(CheckpointStore(tmp_path / name / "checkpoints").latest().adapter_path / "adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert all(torch.allclose(tensor, two[name], atol=1e-3) for name, tensor in one.items())
    rewards = [row["reward_mean"] for row in metrics(tmp_path / "whole")]
    assert sum(rewards[2:]) > sum(rewards[:2])
    gaps = [row["logprob_gap_max"] for row in metrics(tmp_path / "whole") if "logprob_gap_max" in row]
    assert max(gaps) < 1e-4  # rollouts were sampled with the adapter
    base, merged = (load_file(Path(folder) / "model.safetensors") for folder in (before.model, whole.model))
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved
    assert all("_proj" in name for name in moved)


class Broken(Coin):
    """Cannot be played on every fourth task."""

    def act(self, message: Any) -> Any:
        if int(self.task.id.partition("-")[2]) % 4 == 0:
            raise OSError("the table is gone")
        return super().act(message)


def test_a_warm_start_does_not_learn_from_what_failed(tmp_path: Path) -> None:
    recipe = made(
        env={"kind": f"{__name__}:Broken"},
        warm_start={**WARM, "sft": {"updates": 1}},
        budget={"iterations": 0},
        evaluation={"test_tasks": 0, "every": 0},
    )
    play(recipe, tmp_path)
    with TrajectoryStore(tmp_path / "trajectories") as store:
        assert len(store.ids(final_only=True)) == 16
    assert metrics(tmp_path)[0]["warm_start"]["trajectories"] == 12


class Absent:
    """An agent that does not come."""

    async def run(self, episode: Any) -> None:
        raise ConnectionError("the agent's server is gone")


def test_infrastructure_that_fails_stops_the_run_and_keeps_what_was_played(tmp_path: Path) -> None:
    recipe = made(warm_start=None, agent={"kind": f"{__name__}:Absent"}, evaluation={"test_tasks": 0, "every": 0})
    recipe = recipe.model_copy(update={"outcomes": {"window": 20}})
    with pytest.raises(RunStoppedError, match="agent's server is gone"):
        play(recipe, tmp_path)
    assert len(TrajectoryStore(tmp_path / "trajectories")) >= 4
    RunFolder(tmp_path, config={}, digest=recipe.digest).close()  # the folder was let go


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
