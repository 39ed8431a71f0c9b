"""An environment in which an agent learns to say heads, and a recipe small enough to learn it in a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from stepgym.env.base import Env
from stepgym.env.messages import user
from stepgym.env.task import Task
from stepgym.errors import ActionError

MODEL = {
    "kind": "tiny",
    "vocab_size": 320,
    "layers": 1,
    "width": 64,
    "heads": 2,
    "context_length": 96,
    "corpus_tasks": 16,
    "special_tokens": ["<say>", "</say>"],
}
WARM = {
    "tasks": 16,
    "sft": {"updates": 25, "batch_size": 16, "optimizer": {"learning_rate": 5e-3, "warmup_updates": 2}},
}
RECIPE: dict[str, Any] = {
    "env": {"kind": "coin:Coin"},
    "model": MODEL,
    "rollout": {"samples": 4, "max_response_tokens": 10},
    "warm_start": WARM,
    "algorithm": {"optimizer": {"learning_rate": 1e-3, "warmup_updates": 2}},
    "budget": {"iterations": 4, "tasks_per_iteration": 4},
    "evaluation": {"every": 2, "validation_tasks": 4, "test_tasks": 6},
    "checkpoint": {"every": 3, "keep": 1},
    "threads": 1,
}
closed: list[str] = []


class Shelf:
    """What the environments share."""

    def close(self) -> None:
        closed.append("shelf")


class Coin(Env):
    """Say heads or tails; the expert says both as often, and heads wins."""

    stop = ("</say>",)
    max_turns = 2

    @classmethod
    def open_shared(cls, **config: Any) -> Shelf:
        return Shelf()

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{n}", prompt="Toss.", answer="heads" if n % 2 else "tails") for n in range(40)]

    def begin(self, task: Task) -> Any:
        assert isinstance(self.shared, Shelf)
        return [user(task.prompt)]

    def act(self, message: Any) -> Any:
        said = message["text"]
        if said not in ("<say>heads</say>", "<say>tails</say>"):
            raise ActionError("say heads or tails", status="no_action")
        return [], float(said == "<say>heads</say>"), True, False, {}

    def expert(self, task: Task) -> Iterator[str]:
        yield f"<say>{task.answer}</say>"


class Table(Sequence[Task]):
    """Tasks made when they are asked for, from something open, which cannot go to another process."""

    def __init__(self, split: str) -> None:
        self.open = threading.Lock()
        self.split = split

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: Any) -> Any:
        with self.open:
            return Task(id=f"{self.split}-{place}", prompt="Toss.", answer="heads" if place % 2 else "tails")


class LazyCoin(Coin):
    """Its tasks are in a table of its own kind."""

    def tasks(self, split: str) -> Any:
        return Table(split)
