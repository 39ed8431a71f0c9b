"""A tokenizer, an engine that says what it is told, and an environment that counts: for tests of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from stepgym.env.base import Env
from stepgym.env.messages import Message, user
from stepgym.env.task import Task
from stepgym.errors import ActionError
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.step import Ids, Sampling


class Parrot(Engine):
    """Answers each prompt with the text that `say(prompt_text, seed)` returns (or raises), and logs both ids."""

    kind = "parrot"
    model = "parrot"

    def __init__(self, tokenizer: Any, say: Callable[[str, int], str], *, delay: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._say = say
        self._delay = delay
        self.log: list[tuple[list[int], list[int]]] = []

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

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
        if self._delay:
            await asyncio.sleep(self._delay)
        text = self._say(self._tokenizer.decode(prompt_ids), seed or 0)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not text.endswith(tuple(stop) or "\0"):
            ids = [*ids, self._tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        self.log.append((prompt_ids.tolist(), list(ids)))
        return Completion(np.asarray(ids, dtype=np.int32), np.full(len(ids), -0.5, dtype=np.float32), reason)


class Count(Env):
    """Say the numbers 1, 2, 3 one after the other as <say>n</say>; each right one gives 0.25, the last one ends it."""

    stop = ("</say>",)
    max_turns = 6
    success_threshold = 0.75

    def __init__(self, *, goal: int = 3) -> None:
        self.goal = goal

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{split}-{n}", prompt="Count.", answer=self.goal) for n in range(20)]

    def begin(self, task: Task) -> list[Message]:
        self.next = 1
        return [user(f"{task.prompt} To {self.goal}.")]

    def act(self, message: Message) -> Any:
        text = message["text"]
        if f"<say>{self.next}</say>" not in text:
            raise ActionError(f"expected <say>{self.next}</say>", status="no_action")
        self.next += 1
        over = self.next > self.goal
        return [user("good")], 0.25, over, False, {"reward_parts": {"counted": 0.25}, "metrics": {"at": self.next}}

    def expert(self, task: Task, *, skip: int = 0) -> Any:
        for number in range(1, self.goal + 1):
            if number != skip:
                yield f"<say>{number}</say>"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    texts = ["Count to 3.", "<say>1</say>", "good", "Error: expected <say>2</say>"] * 3
    return build_tiny_tokenizer(texts, special_tokens=["<say>", "</say>"])


@pytest.fixture
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


@pytest.fixture
def parrot(tokenizer: Any) -> Callable[..., Parrot]:
    return lambda say, **options: Parrot(tokenizer, say, **options)


@pytest.fixture
def count_env() -> type[Env]:
    return Count


@pytest.fixture
def counts() -> Callable[[str, int], str]:
    """Says the number that is due, by counting its own turns in the prompt."""
    return lambda prompt, seed: f"<say>{prompt.count('assistant')}</say>"
