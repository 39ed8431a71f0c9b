"""Which tasks of the training split an iteration plays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.env.worker import threads
from stepgym.run.env_source import EnvSource
from stepgym.seeds import derive_seed


class TrainingTasks:
    """The training split, and the order in which it is played. Depends on the seed, never on what happened before.

    Args:
        table: The split.
        seed: The run's seed.
        first: Position of the first task that is played: those before were taken by the warm start.
        per_iteration: Tasks of one iteration.
        iterations: Iterations of the run.
    """

    def __init__(self, table: Sequence[Any], *, seed: int, first: int, per_iteration: int, iterations: int) -> None:
        self.table = table
        self._seed = seed
        self._first = first
        self._per_iteration = per_iteration
        self._iterations = iterations

    def of(self, iteration: int) -> list[Task]:
        """The tasks of an iteration: the split in order, or anew in a seeded order for every pass over a small one."""
        count, size, first = self._per_iteration, len(self.table), self._first
        if size >= first + count * self._iterations:
            return self._at(range(first + (iteration - 1) * count, first + iteration * count))
        turn, place = divmod(iteration - 1, size // count)
        order = np.random.default_rng(derive_seed(self._seed, "order", turn)).permutation(size)
        return self._at(order[place * count : (place + 1) * count].tolist())

    def others(self, iteration: int, round_: int, count: int, *, without: Collection[str]) -> list[Task]:
        """Tasks in the place of some of an iteration, drawn by the seed; fewer where the split has no more.

        Args:
            iteration: The iteration.
            round_: How often some have been replaced in it already.
            count: How many.
            without: Ids of tasks that it has had.
        """
        order = np.random.default_rng(derive_seed(self._seed, "refill", iteration, round_)).permutation(len(self.table))
        found: list[Task] = []
        for position in order.tolist():
            if len(found) == count:
                break
            (task,) = self._at([position])
            if task.id not in without:
                found.append(task)
        return found

    def _at(self, positions: Sequence[int]) -> list[Task]:
        rows = [self.table[int(position)] for position in positions]
        return [row if isinstance(row, Task) else Task.from_dict(row) for row in rows]


async def training_table(source: EnvSource) -> Sequence[Any]:
    """The tasks of the training split, as the environment gives them."""
    env = source.make()
    try:
        unwrapped: Env = env.unwrapped  # type: ignore[assignment]
        table: Sequence[Any] = await threads.run(unwrapped.tasks, "train")
        return table
    finally:
        await threads.run(env.close)
