"""Plays episodes of an environment that is being checked, and checks every answer on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stepgym.config import validate_kwargs
from stepgym.env.base import Env
from stepgym.env.findings import BrokenPromiseError
from stepgym.env.messages import Message
from stepgym.env.task import Task
from stepgym.env.worker import call_hook, run_blocking

LARGE = 200
"""Tasks looked at per split; a split may be endless."""


@dataclass
class Player:
    """Plays episodes of one environment class.

    Attributes:
        cls: The class.
        config: Its config.
        seed: Seeds every episode.
        tasks_per_split: How many tasks of a split are played.
        step_timeout: Seconds after which a reset or a step counts as hung.
    """

    cls: type[Env]
    config: dict[str, Any]
    seed: int
    tasks_per_split: int
    step_timeout: float

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return validate_kwargs(self.cls, self.config, self.cls.__name__)

    @contextmanager
    def made(self) -> Iterator[Env]:
        """An environment, closed at the end."""
        env = self.cls(**self.arguments)
        try:
            yield env
        finally:
            env.close()

    @contextmanager
    def begun(self) -> Iterator[tuple[Env, Task]]:
        """An environment with an episode begun, and its task."""
        task = self.some_tasks()[0]
        with self.made() as env:
            self.reset(env, {"task": task})
            yield env, task

    def some_tasks(self) -> list[Task]:
        """A few tasks of the first split."""
        with self.made() as env:
            return self.tasks(env, env.splits[0], self.tasks_per_split)

    def reset(self, env: Env, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Reset, and check what comes back."""
        result: tuple[Any, dict[str, Any]] = self.timed(env.areset(seed=self.seed, options=options), "reset")
        if not env.observation_space.contains(result[0]):
            raise BrokenPromiseError(f"reset: the observation is not a list of messages: {result[0]!r:.150}")
        return result

    def step(self, env: Env, action: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, and check what comes back."""
        result: tuple[Any, float, bool, bool, dict[str, Any]] = self.timed(env.astep(action), "step")
        observation, _, terminated, truncated, info = result
        if not env.observation_space.contains(observation):
            raise BrokenPromiseError(f"step: the observation is not a list of messages: {observation!r:.150}")
        low, high = env.reward_range
        if (terminated or truncated) and not low - 1e-6 <= env._total <= high + 1e-6:
            raise BrokenPromiseError(
                f"an episode's total reward is {env._total}, outside of reward_range {env.reward_range}"
            )
        parts = info.get("reward_parts", {})
        if not isinstance(parts, Mapping) or not all(isinstance(part, int | float) for part in parts.values()):
            raise BrokenPromiseError(f"info['reward_parts'] must be named numbers, not {parts!r:.150}")
        return result

    def timed(self, coroutine: Any, what: str) -> Any:
        """Wait for a reset or a step, but not for ever."""

        async def wait() -> Any:
            try:
                return await asyncio.wait_for(coroutine, self.step_timeout)
            except TimeoutError:
                raise BrokenPromiseError(f"{what} took longer than {self.step_timeout:g} s") from None

        return run_blocking(wait())

    def script(self, env: Env, task: Task) -> Iterator[Message | str]:
        """The expert's messages, or nonsense where there is no expert."""
        if has_expert(env):
            yield from env.expert(task)
        else:
            space = type(env.action_space)(seed=self.seed)
            while True:
                yield space.sample()

    def play(self, task: Task) -> Iterator[tuple[Any, float | None, bool, dict[str, Any]]]:
        """One episode by the script: (observation, reward, over, info) after the reset and after each turn."""
        with self.made() as env:
            observation, info = self.reset(env, {"task": task})
            yield observation, None, False, info
            for action in self.script(env, task):
                observation, reward, terminated, truncated, info = self.step(env, action)
                yield observation, reward, terminated or truncated, info
                if terminated or truncated:
                    return

    def transcript(self, task: Task) -> list[Any]:
        """An episode by the script, without what may differ: times in `info`."""
        return [event[:3] for event in self.play(task)]

    def tasks(self, env: Env, split: str, count: int = LARGE) -> list[Task]:
        """Up to `count` tasks of a split, evenly spread over it."""
        return picked(self.table(env, split), count)

    def table(self, env: Env, split: str) -> Sequence[Any]:
        """All tasks of a split."""
        table: Sequence[Any] = run_blocking(call_hook(env.tasks, split))
        return table


def has_expert(env: Env) -> bool:
    """Whether the environment brings an expert of its own."""
    return type(env).expert is not Env.expert


def picked(table: Sequence[Any], count: int = LARGE) -> list[Task]:
    """Up to `count` tasks of a table, evenly spread over it."""
    size = len(table)
    indices = sorted({round(i * (size - 1) / max(1, count - 1)) for i in range(count)}) if size > count else range(size)
    rows = (table[index] for index in indices)
    return [row if isinstance(row, Task) else Task.from_dict(row) for row in rows]
