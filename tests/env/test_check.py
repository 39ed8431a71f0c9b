from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stepgym import ActionError, Env, Task, ToolEnv, tool
from stepgym.env.check import CheckReport, check_env
from stepgym.env.messages import Message, tool_call
from stepgym.errors import UserError


class Good(ToolEnv):
    """Keeps every promise."""

    max_turns = 4

    def __init__(self, *, size: int = 9) -> None:
        self.size = size

    def tasks(self, split: str) -> list[Task]:
        first = self.splits.index(split) * self.size
        return [Task(id=str(n), prompt="Find it.", answer=n) for n in range(first, first + self.size)]

    def begin(self, task: Task) -> str:
        self.found = False
        return task.prompt

    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        self.found = number == self.task.answer
        return str(self.found)

    def score(self) -> Any:
        return float(self.found)

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        yield tool_call("guess", number=task.answer)
        yield "done"


class Tags(Env):
    """Keeps every promise, with tags instead of tools."""

    stop = ("</answer>",)
    max_turns = 3

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{n}", "prompt": "Say x.", "answer": "x"} for n in range(3)]

    async def act(self, message: Message) -> Any:
        text = message["text"]
        if "<answer>" not in text or "</answer>" not in text:
            raise ActionError("Answer with <answer>…</answer>.", status="no_action")
        said = text.split("<answer>", 1)[1].split("</answer>")[0]
        return "", float(said == self.task.answer), True, False, {}

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        yield "<answer>x</answer>"


class PositionalConfig(Good):
    def __init__(self, size: int = 9) -> None:
        super().__init__(size=size)


class UntypedConfig(Good):
    def __init__(self, *, size=9) -> None:  # type: ignore[no-untyped-def]
        super().__init__(size=size)


class BadRange(Good):
    reward_range = (1.0, 1.0)


class DoubledTasks(Good):
    def tasks(self, split: str) -> list[Task]:
        return super().tasks(split)[:1] * 2


class NoTasks(Good):
    def tasks(self, split: str) -> list[Task]:
        return [] if split == "test" else super().tasks(split)


class TasksNotJson(Good):
    def tasks(self, split: str) -> list[Task]:
        return [Task(id=task.id, answer=task.answer, data={"set": {1}}) for task in super().tasks(split)]


class ChangingTasks(Good):
    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{task.id}-{time.perf_counter_ns()}", answer=task.answer) for task in super().tasks(split)]


class SharedTasks(Good):
    def tasks(self, split: str) -> list[Task]:
        return super().tasks("train")


class BadSchema(Good):
    def begin(self, task: Task) -> str:
        self.tools = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "objekt"}}}]
        return super().begin(task)


class BadToolName(Good):
    def begin(self, task: Task) -> str:
        self.tools = [{"type": "function", "function": {"name": "guess it!", "parameters": {"type": "object"}}}]
        return super().begin(task)


class SilentTool(Good):
    @tool
    def other(self, a: int) -> str:
        return "x"


class NotOpenAI(Good):
    def begin(self, task: Task) -> str:
        self.tools = [{"name": "guess"}]
        return super().begin(task)


class Unseeded(Good):
    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        super().guess(number)
        return f"{time.perf_counter_ns()}"


class SharedState(Good):
    turns: list[int] = []  # noqa: RUF012 - the mistake that is to be found

    def begin(self, task: Task) -> str:
        self.turns.clear()
        return super().begin(task)

    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        self.turns.append(number)
        super().guess(number)
        return f"{len(self.turns)} turns"

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        for _ in range(2):
            yield tool_call("guess", number=task.answer)
        yield "done"


class BadExpert(Good):
    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        yield tool_call("guess", number=task.answer + 1)
        yield "done"


class ShortExpert(Good):
    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        yield tool_call("guess", number=task.answer)


class RefusedExpert(Good):
    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        yield tool_call("gess", number=task.answer)
        yield tool_call("guess", number=task.answer)
        yield "done"


class NoExpert(Good):
    expert = Env.expert


class TooMuch(Good):
    def score(self) -> Any:
        return {"one": 1.0, "two": float(self.found)}


class BadParts(Good):
    def score(self) -> Any:
        return {"one": True, "two": "x"} if self.found else 0.0


class NoLimit(Good):
    max_turns = 0


class Fragile(Good):
    async def act(self, message: Message) -> Any:
        json.dumps(message["text"], ensure_ascii=False).encode()  # fails for a lone surrogate
        return await super().act(message)


class FragileTool(Good):
    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        if number < 0:
            raise RuntimeError("negative")
        return super().guess(number)


class Mute(Tags):
    def error_observation(self, message: Message, error: ActionError) -> Any:
        return []


class Hanging(Good):
    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        if number < -5:
            time.sleep(30)
        return super().guess(number)


class Heavy(Good):
    def __init__(self, *, size: int = 9) -> None:
        super().__init__(size=size)
        time.sleep(0.002)


class LeakyFile(Good):
    kept: list[Any] = []  # noqa: RUF012 - the mistake that is to be found

    def begin(self, task: Task) -> str:
        self.kept.append(open(os.devnull))  # noqa: SIM115
        return super().begin(task)


class LeakyTemporary(Good):
    def begin(self, task: Task) -> str:
        os.close(tempfile.mkstemp()[0])
        return super().begin(task)


class LeakyThread(Good):
    def begin(self, task: Task) -> str:
        threading.Thread(target=time.sleep, args=(8,), name="leaky", daemon=True).start()
        return super().begin(task)


class LeakyProcess(Good):
    children: list[Any] = []  # noqa: RUF012 - the mistake that is to be found

    @classmethod
    def open_shared(cls, **config: Any) -> Any:
        cls.children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return "no close"

    def begin(self, task: Task) -> str:
        assert self.shared == "no close"
        return super().begin(task)


def found(report: CheckReport, check: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.message) for finding in report.findings if finding.check == check]


@pytest.mark.parametrize("cls", [Good, Tags])
def test_a_good_environment_passes_every_check(cls: type[Env]) -> None:
    report = check_env(cls)
    assert report.ok
    assert not report.warnings, str(report)
    assert [finding.check for finding in report.findings] == [
        "config",
        "tasks",
        "tools",
        "gymnasium",
        "seeds",
        "concurrent",
        "expert",
        "max_turns",
        "garbage",
        "constructor",
        "close",
    ]
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


@pytest.mark.parametrize(
    ("cls", "check", "level", "message"),
    [
        (PositionalConfig, "config", "error", "must be keyword-only (after a *): size"),
        (UntypedConfig, "config", "warning", "fields without a type hint are not checked: size"),
        (BadRange, "config", "error", "low < high"),
        (DoubledTasks, "tasks", "error", "two tasks with the id '0'"),
        (NoTasks, "tasks", "error", "the split 'test' has no tasks"),
        (TasksNotJson, "tasks", "error", "the task '0' of the split 'train' is not JSON"),
        (ChangingTasks, "tasks", "error", "has other tasks on a second look"),
        (SharedTasks, "tasks", "warning", "train and test share tasks (9 ids of those looked at)"),
        (BadSchema, "tools", "error", "must be a JSON Schema of the type 'object'"),
        (BadToolName, "tools", "error", "a tool's name has up to 64 letters, digits, _ and -"),
        (NotOpenAI, "tools", "error", "a tool is"),
        (SilentTool, "tools", "warning", "tools without a description: other"),
        (Unseeded, "seeds", "error", "the same seed gave"),
        (SharedState, "concurrent", "error", "is there state on the class?"),
        (BadExpert, "expert", "error", "split 'train', task '0': the expert does not succeed"),
        (ShortExpert, "expert", "error", "the expert has no more messages"),
        (RefusedExpert, "expert", "error", "the expert's action is refused: unknown tool 'gess'"),
        (NoExpert, "expert", "warning", "has no expert"),
        (TooMuch, "expert", "error", "total reward is 2.0, outside of reward_range (0.0, 1.0)"),
        (BadParts, "expert", "error", "unsupported operand"),
        (NoLimit, "max_turns", "error", "max_turns must be a whole number from 1, not 0"),
        (Fragile, "garbage", "error", "UnicodeEncodeError"),
        (FragileTool, "garbage", "error", "RuntimeError: negative"),
        (Mute, "garbage", "error", "got no answer, and the episode went on"),
        (Heavy, "constructor", "warning", "over 1 ms: open what is heavy in open_shared"),
        (LeakyFile, "close", "error", "open file /dev/null"),
        (LeakyTemporary, "close", "error", "temporary files behind"),
        (LeakyThread, "close", "error", "thread 'leaky'"),
        (LeakyProcess, "close", "error", "left after everything was closed: process"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_every_broken_promise_is_found(cls: type[Env], check: str, level: str, message: str) -> None:
    report = check_env(cls)
    assert any(kind == level and message in text for kind, text in found(report, check)), str(report)
    assert report.ok is (level == "warning")
    assert all("\n" not in finding.message for finding in report.findings)
    for child in LeakyProcess.children:
        child.kill()
        child.wait()


def test_an_action_that_hangs_is_found() -> None:
    report = check_env(Hanging, step_timeout=0.2)
    assert found(report, "garbage")[0][0] == "error"
    assert "step took longer than 0.2 s" in found(report, "garbage")[0][1]


def test_config_is_used_and_bad_names_are_the_users() -> None:
    assert "train 2, validation 2, test 2" in str(check_env(Good, {"size": 2}))
    with pytest.raises(UserError, match="Good: unknown field 'sise'; did you mean 'size'"):
        check_env(Good, {"sise": 2})
    with pytest.raises(UserError, match="unknown environment 'no-such-env'"):
        check_env("no-such-env")
