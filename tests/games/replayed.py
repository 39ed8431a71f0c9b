"""Environments, an engine and planted changes for the tests of replays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from stepgym.env.base import Env
from stepgym.env.messages import Message, tool_call, user
from stepgym.env.task import Task
from stepgym.env.tool_env import ToolEnv
from stepgym.env.tools import tool
from stepgym.errors import ActionError
from stepgym.inspect.replay import Replay
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.record.step import Ids, Sampling
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory

TASKS = [Task(id=str(n), prompt="Guess 1..100.", answer=n) for n in (17, 36, 90)]
moods: dict[str, Any] = {}
"""What the environments below do otherwise than when they were recorded."""


class Guess(ToolEnv):
    """A number is guessed with a tool. Deterministic, with parts."""

    max_turns = 9
    reward_range = (0.0, 2.0)

    def begin(self, task: Task) -> Any:
        if moods.get("nailed shut"):
            raise RuntimeError("this box is nailed shut")
        self.won, self.low, self.high = False, 1, 100
        return super().begin(task)

    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        if moods.get("hangs"):
            time.sleep(moods["hangs"])
        if moods.get("broken"):
            raise RuntimeError("the lid fell off")
        if number > 100:
            raise ActionError("too high to be true")
        self.won = number == self.task.answer
        return "right" if self.won else "low" if number < self.task.answer else "high"

    @tool
    def give_up(self) -> str:
        """End it."""
        self.finish()
        return "a pity"

    def score(self) -> dict[str, float]:
        return {"won": float(self.won), "polite": moods.get("polite", 0.5)}

    def expert(self, task: Task) -> Iterator[Message | str]:
        yield tool_call("guess", number=101)
        low, high = 1, 100
        while True:
            number = (low + high) // 2
            yield tool_call("guess", number=number)
            low, high = (number + 1, high) if number < task.answer else (low, number)
            if self.won:
                yield "Done."


class Dice(Env):
    """Three throws, from the episode's seed or from chance alone; each says how it fell."""

    max_turns = 3

    def __init__(self, *, seeded: bool = True) -> None:
        self.seeded = seeded

    def begin(self, task: Task) -> Any:
        return [user("Throw.")]

    def act(self, message: Message) -> Any:
        dice = self.np_random if self.seeded else np.random.default_rng()
        thrown = float(dice.random())
        return [user(f"It fell {thrown:.12f} far.")], thrown / 3, False, False, {}

    def expert(self, task: Task) -> Iterator[str]:
        yield from itertools.repeat("throw")


class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that says in each answer how many turns there were."""

    turns = 0

    def step(self, action: Any) -> Any:
        self.turns += 1
        observation, *rest = self.env.step(action)
        return [*observation, user(f"turn {self.turns}")], *rest


def counted() -> Any:
    return Counted(Dice())


class Says(Engine):
    """An engine that says what it is told to, one text for each call."""

    kind = "says"
    model = "says"

    def __init__(self, renderer: Renderer, *texts: str | Exception, context_length: int | None = None) -> None:
        self._renderer = renderer
        self._texts = texts
        self.context_length = context_length
        self.calls = itertools.count()

    @property
    def tokenizer(self) -> Any:
        return self._renderer.tokenizer

    def for_episode(self) -> Engine:
        return Says(self._renderer, *self._texts, context_length=self.context_length)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        text = self._texts[min(next(self.calls), len(self._texts) - 1)]
        if isinstance(text, Exception):
            raise text
        ids = self._renderer.encode_response([], text)
        reason = "stop" if len(ids) <= max_tokens else "length"
        return Completion(ids[:max_tokens], np.full(len(ids[:max_tokens]), -0.5, dtype=np.float32), reason)


def changed(folder: Path, change: Callable[[Trajectory], Trajectory]) -> Path:
    """A copy of a store in which every trajectory went through `change`."""
    copy = folder.with_name(f"{folder.name}-changed")
    with TrajectoryStore(folder) as old, TrajectoryStore(copy, "a") as new:
        for trajectory in old:
            new.append(change(trajectory))
    return copy


def with_step(trajectory: Trajectory, index: int, **fields: Any) -> Trajectory:
    steps = list(trajectory.steps)
    steps[index] = replace(steps[index], **fields)
    return replace(trajectory, steps=steps)


def only(name: str, change: Callable[[Trajectory], Trajectory]) -> Callable[[Trajectory], Trajectory]:
    return lambda trajectory: change(trajectory) if str(trajectory.id) == name else trajectory


def where(result: Replay) -> list[tuple[str, int | None, int | None, str]]:
    return [(d.trajectory, d.turn, d.step, d.what) for d in result.differences]
