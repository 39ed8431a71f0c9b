"""A program that trains, and is killed at a named point: `killed_at.py OUT RECIPE POINT...`; for test_killed_run.py.

It imports everything once and forks a child for each run. The run `whole` is never killed; for each point there is a
run of that name, whose first child kills itself there with SIGKILL and whose second one goes on to the end. Printed is
one JSON object: how the two children of each run ended (0; -9 for killed).

Hooks are put around the library's own functions, which do what they always do; the library knows nothing of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
import transformers
from coin import Coin

import stepgym.train.copy_sync  # noqa: F401
from stepgym.model.engines import transformers as engine  # noqa: F401
from stepgym.record.store import TrajectoryStore
from stepgym.run.folder import run_folder
from stepgym.train.checkpoint import CheckpointStore
from stepgym.train.learner import Learner
from stepgym.train.loop import train
from stepgym.train.metrics_log import MetricsLog
from stepgym.train.observer import Observer
from stepgym.train.optimizer import Optimizer
from stepgym.train.policy import Policy
from stepgym.train.recipe import check_recipe

_LOADED = (transformers.Qwen3ForCausalLM, transformers.PreTrainedTokenizerFast, pyarrow.dataset)


class HalfDull(Coin):
    """Every other task rewards whatever is said alike, so that groups are refilled."""

    def act(self, message: Any) -> Any:
        observation, reward, terminated, truncated, info = super().act(message)
        dull = int(self.task.id.partition("-")[2]) % 2 == 0
        return observation, 0.0 if dull else reward, terminated, truncated, info


class Anything(Coin):
    """Rewards by the length of whatever is said, so that there is something to learn without a warm start."""

    def act(self, message: Any) -> Any:
        return [], float(len(message["text"]) % 2), True, False, {}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_down(number: int) -> Callable[[], None]:
    """Dies at the n-th call."""
    left = [number]

    def called() -> None:
        left[0] -= 1
        if left[0] == 0:
            die()

    return called


def around(
    cls: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Let a method call something before or after it does its work."""
    method = getattr(cls, name)

    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        if before is not None:
            before(self, *args)
        result = method(self, *args, **options)
        if after is not None:
            after()
        return result

    setattr(cls, name, wrapped)


class Dies(Observer):
    """Dies when a stage has come so far."""

    def __init__(self, stage: str, done: int) -> None:
        self._wanted, self._done = stage, done
        self._stage = ""

    def stage(self, name: str, total: int | None) -> None:
        self._stage = name

    def advance(self, done: int, numbers: Mapping[str, float]) -> None:
        if self._wanted in self._stage and done >= self._done:
            die()


def arm(point: str) -> Observer:
    """Put the hook of a point in its place."""
    if point == "warm start":
        return Dies("warm start", 12)
    if point == "expert":
        return Dies("expert", 7)
    if point == "first evaluation":
        return Dies("test", 3)
    if point == "validation":
        return Dies("validation", 2)
    if point == "refill":
        return Dies("refill", 3)
    if point == "rollout":  # some of its episodes are on disk, others are lost
        appended = [0]

        def flush_at_first(store: TrajectoryStore, *_: Any) -> None:
            appended[0] += 1
            if appended[0] % 5 == 0:
                store.flush()

        around(TrajectoryStore, "append", before=flush_at_first)
        return Dies("rollout 3", 8)
    if point == "before update":
        called = count_down(3)
        around(Learner, "update", before=lambda *_: called())
    elif point == "between mini-batches":
        batches = [0]

        def begin(*_: Any) -> None:
            batches[0] += 1

        def stepped() -> None:
            if batches[0] == 3:
                die()

        around(Learner, "update", before=begin)
        around(Optimizer, "step", after=stepped)
    elif point == "before metrics":
        called = count_down(3)
        around(MetricsLog, "iteration", before=lambda *_: called())
    elif point == "after metrics":
        called = count_down(3)
        around(MetricsLog, "iteration", after=called)
    elif point == "before checkpoint":
        called = count_down(2)
        around(CheckpointStore, "save", before=lambda *_: called())
    elif point == "in checkpoint":
        called = count_down(2)
        around(Policy, "save", after=called)
    elif point in ("before rename", "after rename"):
        called, rename = count_down(2), Path.rename

        def renamed(self: Path, target: Any) -> Path:
            partial = self.name.startswith(".partial-update")
            if partial and point == "before rename":
                called()
            result = rename(self, target)
            if partial and point == "after rename":
                called()
            return result

        Path.rename = renamed  # type: ignore[method-assign]
    elif point != "never":
        raise SystemExit(f"no such point: {point}")
    return Observer()


def run(out: Path, fields: dict[str, Any], point: str) -> int:
    """One child: 0 when it came to its end, -9 when it was killed."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        recipe = check_recipe(fields, Path("x.yaml"))
        observer = arm(point)
        with run_folder(out, config=recipe.model_dump(mode="json"), digest=recipe.digest) as folder:
            train(recipe, folder, observer)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    out, fields = Path(sys.argv[1]), json.loads(sys.argv[2])
    ended = {"whole": [run(out / "whole", fields, "never")]}
    for point in sys.argv[3:]:
        ended[point] = [run(out / point, fields, point), run(out / point, fields, "never")]
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
