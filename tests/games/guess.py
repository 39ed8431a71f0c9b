"""A small environment of tools: guess a number. Its expert guesses twice and says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepgym.env.messages import tool_call
from stepgym.env.task import Task
from stepgym.env.tool_env import ToolEnv
from stepgym.env.tools import tool


class Guess(ToolEnv):
    """Find a number."""

    max_turns = 4
    on_malformed = "observe"

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=str(n), prompt="Guess a number from 1 to 100.", answer=n) for n in range(1, 101)]

    def begin(self, task: Task) -> Any:
        self.won = False
        return super().begin(task)

    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        self.won = number == self.task.answer
        return "right" if self.won else "low" if number < self.task.answer else "high"

    def score(self) -> float:
        return float(self.won)

    def expert(self, task: Task) -> Iterator[Any]:
        yield tool_call("guess", number=50)
        yield tool_call("guess", number=task.answer)
        yield "It is the answer."
