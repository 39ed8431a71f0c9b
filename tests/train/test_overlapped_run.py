"""Whole runs whose rollouts overlap with training, and runs that refill groups: on real engines, in this process."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from coin import RECIPE, Coin

from stepgym.errors import UserError
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.folder import run_folder
from stepgym.run.rollouts import RunStoppedError
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.loop import train
from stepgym.train.observer import Observer
from stepgym.train.recipe import Recipe, check_recipe
from stepgym.train.result import TrainingResult
from stepgym.train.training_tasks import TrainingTasks


def made(**changes: Any) -> Recipe:
    small: dict[str, Any] = {
        **RECIPE,
        "budget": {"iterations": 5, "tasks_per_iteration": 4},
        "evaluation": {"every": 0, "test_tasks": 0},
        "checkpoint": {"every": 1, "keep": 9},
    }
    fields = {name: {**small.get(name, {}), **v} if isinstance(v, dict) else v for name, v in changes.items()}
    return check_recipe({**small, **fields}, Path("x.yaml"))


def play(recipe: Recipe, path: Path, observer: Observer | None = None) -> TrainingResult:
    with run_folder(path, config=recipe.model_dump(mode="json"), digest=recipe.digest) as folder:
        return train(recipe, folder, observer)


def metrics(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["iteration"]]


def by_iteration(path: Path) -> dict[int, list[Trajectory]]:
    found = defaultdict(list)
    with TrajectoryStore(path / "trajectories") as store:
        for trajectory in store.read(phase="train", final_only=True):
            found[trajectory.id.iteration].append(trajectory)
    return found


def versions(trajectory: Trajectory) -> set[int]:
    return {int(version) for step in trajectory.steps for version, _, _ in step.weights_versions}


def assert_logprobs_are_those_of_the_weights_that_spans_name(path: Path) -> int:
    """Every token of every trajectory, by the checkpoint of its version. Returns how many steps had two versions."""
    from transformers import AutoModelForCausalLM

    models = {
        checkpoint.update: AutoModelForCausalLM.from_pretrained(str(checkpoint.model_path)).eval()
        for checkpoint in CheckpointStore(path / "checkpoints", keep=9).all()
    }
    mixed = 0
    for trajectories in by_iteration(path).values():
        for step in (step for trajectory in trajectories for step in trajectory.steps):
            assert step.prompt_ids is not None
            assert step.response_ids is not None
            assert step.logprobs is not None
            ids = torch.from_numpy(np.concatenate([step.prompt_ids, step.response_ids]).astype(np.int64))[None]
            mixed += len(step.weights_versions) > 1
            for version, start, end in step.weights_versions:
                with torch.no_grad():
                    table = torch.log_softmax(models[int(version)](ids).logits[0, len(step.prompt_ids) - 1 : -1], -1)
                own = table.gather(1, ids[0, len(step.prompt_ids) :, None])[:, 0].numpy()
                np.testing.assert_allclose(step.logprobs[start:end], own[start:end], atol=2e-4)
    return mixed


def test_one_step_off_plays_a_lot_by_the_weights_before_the_update_beside_it(tmp_path: Path) -> None:
    play(made(overlap="one_step_off"), tmp_path)
    rows = metrics(tmp_path)
    made_by = {row["iteration"]: row["update"] for row in rows}
    lots = by_iteration(tmp_path)
    assert set(lots) == {1, 2, 3, 4, 5}
    for iteration, trajectories in lots.items():
        assert len(trajectories) == 16
        for trajectory in trajectories:
            assert versions(trajectory) == {made_by.get(iteration - 2, 0)}
    for row in rows:
        number = row["iteration"]
        assert row["staleness_mean"] == row["staleness_max"] == made_by.get(number - 1, 0) - made_by.get(number - 2, 0)
        assert "stale_dropped" not in row
        assert "logprob_gap_mean" in row
    assert_logprobs_are_those_of_the_weights_that_spans_name(tmp_path)


class SlowCoin(Coin):
    """Takes a while for some tasks, so that weights change while it is played."""

    def act(self, message: Any) -> Any:
        time.sleep(0.15 if int(self.task.id.partition("-")[2]) % 4 == 0 else 0.002)
        return super().act(message)


def test_async_takes_lots_in_order_and_plays_anew_what_is_too_old(tmp_path: Path) -> None:
    recipe = made(
        env={"kind": f"{__name__}:SlowCoin"},
        overlap={"kind": "async", "lookahead": 3, "max_staleness": 1},
        budget={"iterations": 6, "tasks_per_iteration": 4},
        rollout={"samples": 4, "max_response_tokens": 10, "concurrency": 6},
    )
    play(recipe, tmp_path)
    rows, lots = metrics(tmp_path), by_iteration(tmp_path)
    updates = {0: 0, **{row["iteration"]: row["update"] for row in rows}}
    assert sum(row["stale_dropped"] for row in rows) > 0
    newest = set()
    for row in rows:
        number, trajectories = row["iteration"], lots[row["iteration"]]
        stale = [t for t in trajectories if updates[number - 1] - min(versions(t), default=0) > 1]
        assert row["stale_dropped"] == len(stale)
        assert len(trajectories) == 16 + len(stale)  # one played in the place of each
        assert row["members"] + row["dropped"] + row["masked"] == 16
        assert row["staleness_max"] <= 1
        assert all(max(versions(t), default=0) <= updates[number - 1] for t in trajectories)
        samples = defaultdict(set)
        for trajectory in trajectories:
            samples[trajectory.id.task_id].add(trajectory.id.sample)
        assert len(samples) == 4
        for found in samples.values():
            assert found == set(range(len(found)))
        newest |= {max(versions(t), default=0) for t in trajectories}
    assert len(newest) > 2  # weights did change on the way
    assert_logprobs_are_those_of_the_weights_that_spans_name(tmp_path)
    again = play(recipe, tmp_path)  # a finished run is finished
    assert again.updates == rows[-1]["update"]


class Watched(Coin):
    """Counts what is open."""

    begun: int = 0
    closed: int = 0
    lock = threading.Lock()

    def begin(self, task: Any) -> Any:
        with self.lock:
            Watched.begun += 1
        self.counts = True
        return super().begin(task)

    def act(self, message: Any) -> Any:
        time.sleep(0.02)
        return super().act(message)

    def close(self) -> None:
        with self.lock:
            Watched.closed += getattr(self, "counts", False)
        self.counts = False
        super().close()


class Interrupted(Observer):
    """Leaves after an iteration, while later lots are in flight."""

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        if number == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["one_step_off", "async"])
def test_an_interrupt_ends_what_is_in_flight_and_the_run_goes_on_later(tmp_path: Path, kind: str) -> None:
    Watched.begun = Watched.closed = 0
    overlap = {"kind": kind} if kind == "one_step_off" else {"kind": kind, "lookahead": 2}
    recipe = made(env={"kind": f"{__name__}:Watched"}, overlap=overlap, checkpoint={"every": 2, "keep": 9})
    with pytest.raises(KeyboardInterrupt):
        play(recipe, tmp_path, Interrupted())
    assert Watched.begun == Watched.closed > 0
    stored = sum(map(len, by_iteration(tmp_path).values()))
    play(recipe, tmp_path)
    assert [row["iteration"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert Watched.begun == Watched.closed
    total = sum(map(len, by_iteration(tmp_path).values()))
    assert total == 80 > stored
    with TrajectoryStore(tmp_path / "trajectories") as store:
        assert len(store.ids()) == len(set(store.ids()))


class Absent:
    """An agent that stops coming in the second iteration."""

    async def run(self, episode: Any) -> None:
        if episode.task.id in {f"train-{n}" for n in range(20, 40)}:
            raise ConnectionError("the agent's server is gone")
        while not episode.done:
            await episode.step(await episode.session.chat(episode.messages, stop=episode.stop))


def test_failures_of_a_lot_in_flight_end_the_run_in_order(tmp_path: Path) -> None:
    recipe = made(overlap={"kind": "async", "lookahead": 2}, agent={"kind": f"{__name__}:Absent"})
    recipe = recipe.model_copy(update={"outcomes": {"window": 20}})
    with pytest.raises(RunStoppedError, match="agent's server is gone"):
        play(recipe, tmp_path)
    assert [row["iteration"] for row in metrics(tmp_path)] == [1]
    with TrajectoryStore(tmp_path / "trajectories") as store:
        assert len(list(store.read(phase="train", iteration=1))) == 16


def test_an_error_of_the_trainer_ends_the_rollouts_too(tmp_path: Path) -> None:
    class Fails(Observer):
        def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
            raise UserError("no")

    Watched.begun = Watched.closed = 0
    with pytest.raises(UserError, match=r"^no$"):
        play(made(env={"kind": f"{__name__}:Watched"}, overlap={"kind": "async", "lookahead": 3}), tmp_path, Fails())
    assert Watched.begun == Watched.closed > 0


# ---- refill ---------------------------------------------------------------------------------------------------------


class HalfDull(Coin):
    """Every other task rewards whatever is said alike."""

    def act(self, message: Any) -> Any:
        observation, reward, terminated, truncated, info = super().act(message)
        dull = int(self.task.id.partition("-")[2]) % 2 == 0
        return observation, 0.0 if dull else reward, terminated, truncated, info


@pytest.mark.parametrize("overlap", ["none", "one_step_off"])
def test_groups_without_signal_are_replaced_and_a_resumed_run_decides_alike(tmp_path: Path, overlap: str) -> None:
    one_by_one = {"kind": "transformers", "max_batch_size": 1, "prefix_cache": False}
    recipe = made(
        env={"kind": f"{__name__}:HalfDull"},
        engine=one_by_one,
        overlap=overlap,
        refill={"rounds": 2},
        checkpoint={"every": 4, "keep": 9},
    )
    play(recipe, tmp_path / "whole")
    rows, lots = metrics(tmp_path / "whole"), by_iteration(tmp_path / "whole")
    assert sum(row["refilled_groups"] for row in rows) > 0
    assert max(row["refill_rounds"] for row in rows) == 2
    for row in rows:
        trajectories = lots[row["iteration"]]
        groups = defaultdict(list)
        for trajectory in trajectories:
            groups[trajectory.id.task_id].append(trajectory.reward)
        assert len(groups) == 4 + row["refilled_groups"]
        informative = sum(len(set(rewards)) > 1 for rewards in groups.values())
        assert row["groups"] == 4
        assert row["zero_variance_groups"] == 4 - informative
        assert row["episodes"] == len(trajectories) == 4 * len(groups)
    if overlap == "none":
        without = made(env={"kind": f"{__name__}:HalfDull"}, engine=one_by_one, overlap=overlap)
        play(without, tmp_path / "without")
        before = sum(row["zero_variance_groups"] for row in metrics(tmp_path / "without"))
        assert sum(row["zero_variance_groups"] for row in rows) < before

    with pytest.raises(KeyboardInterrupt):  # before the first checkpoint: all of it is learned again
        play(recipe, tmp_path / "parts", Interrupted())
    play(recipe, tmp_path / "parts")
    for one, two in zip(rows, metrics(tmp_path / "parts"), strict=True):
        for name in ("reward_mean", "refill_rounds", "refilled_groups", "episodes", "loss", "update", "grad_norm"):
            assert one.get(name) == two.get(name), name


class BrokenElsewhere(HalfDull):
    """Fails the first two episodes of every task that only a refill plays."""

    seen: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def begin(self, task: Any) -> Any:
        with self.lock:
            BrokenElsewhere.seen[task.id] += 1
        if int(task.id.partition("-")[2]) >= 24 and BrokenElsewhere.seen[task.id] <= 2:
            raise RuntimeError("the database went away")
        return super().begin(task)


def test_what_fails_among_replacements_is_a_share_of_the_whole_iteration(tmp_path: Path) -> None:
    BrokenElsewhere.seen.clear()
    recipe = made(
        env={"kind": f"{__name__}:BrokenElsewhere"},
        refill={"rounds": 2},
        budget={"iterations": 2, "tasks_per_iteration": 4},
        outcomes={"env_error": {"retries": 0}, "max_dropped_share": 0.3},
    )
    play(recipe, tmp_path)
    lost = 0
    for row, trajectories in zip(metrics(tmp_path), by_iteration(tmp_path).values(), strict=True):
        failed = sum(str(trajectory.outcome) == "env_error" for trajectory in trajectories)
        assert row["outcome/env_error"] == failed
        lost += failed
    assert lost > 0


def test_other_tasks_are_drawn_by_the_seed_and_are_not_those_that_were_there() -> None:
    table = [{"id": f"t{n}", "prompt": "x"} for n in range(10)]
    tasks = TrainingTasks(table, seed=3, first=0, per_iteration=4, iterations=2)
    had = {task.id for task in tasks.of(1)}
    one = [task.id for task in tasks.others(1, 1, 3, without=had)]
    assert one == [task.id for task in tasks.others(1, 1, 3, without=had)]
    assert len(set(one)) == 3
    assert not had & set(one)
    assert {tuple(task.id for task in tasks.others(i, r, 3, without=had)) for i in (1, 2) for r in (1, 2)} != {
        tuple(one)
    }
    assert len(tasks.others(1, 2, 9, without=had)) == 6  # no more are left
    assert tasks.others(1, 2, 9, without={f"t{n}" for n in range(10)}) == []
