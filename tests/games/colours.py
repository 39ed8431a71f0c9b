"""A small environment for tests of whole runs: open a box, see a colour, say it. Learnt by a tiny model in seconds."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from stepgym.env.base import Env
from stepgym.env.messages import Message, user
from stepgym.env.task import Task
from stepgym.errors import ActionError, UserError

COLOURS = ("red", "blue", "green", "white")
SIZES = {"train": 48, "validation": 8, "test": 12}
calls = itertools.count(1)
"""Numbers the actions of this process: a retried episode has its seeds again, so chance alone would fail it again."""


class Colours(Env):
    """Open the box with <say>open</say>, then say the colour that was in it."""

    stop = ("</say>",)

    def __init__(
        self, *, max_turns: int = 3, fail_every: int = 0, break_tasks: int = 0, delay: float = 0.0, diary: str = ""
    ) -> None:
        """See the class.

        Args:
            max_turns: Actions per episode.
            fail_every: Every so manieth action fails by the environment's fault, whoever takes it; 0 none.
            break_tasks: The first so many tasks of a split fail at every attempt.
            delay: Seconds that each call takes.
            diary: A file to which the id of each finished task is added.
        """
        self.max_turns = max_turns
        self.fail_every = fail_every
        self.break_tasks = break_tasks
        self.delay = delay
        self.diary = diary

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SIZES:
            raise UserError(f"Colours: unknown split {split!r}; known: {', '.join(SIZES)}")
        return [
            Task(id=f"{split}-{n}", prompt="Open the box.", answer=COLOURS[zlib.crc32(f"{split}{n}".encode()) % 4])
            for n in range(SIZES[split])
        ]

    def begin(self, task: Task) -> list[Message]:
        if int(task.id.rpartition("-")[2]) < self.break_tasks:
            raise RuntimeError("this box is nailed shut")
        self.opened = False
        return [user(task.prompt)]

    def act(self, message: Message) -> Any:
        time.sleep(self.delay)
        if self.fail_every and next(calls) % self.fail_every == 0:
            raise RuntimeError("the lid fell off")
        said = message["text"].partition("<say>")[2].partition("</say>")[0]
        if not said:
            raise ActionError("say something", status="no_action")
        if not self.opened:
            self.opened = said == "open"
            return self.task.answer if self.opened else "closed", 0.0, False, False, {}
        if self.diary:
            with open(self.diary, "a") as file:
                file.write(self.task.id + "\n")
        return "", float(said == self.task.answer), True, False, {}

    def expert(self, task: Task, *, mistakes: float = 0.0) -> Iterator[str]:
        if self.np_random.random() < mistakes:
            yield "<say>shut</say>"
        yield "<say>open</say>"
        yield f"<say>{task.answer}</say>"
