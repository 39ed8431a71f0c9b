"""Writes the package of a new environment: small, installable, and passing its own test."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from stepgym.env.registry import env_names, short_names
from stepgym.errors import UserError

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def write_package(name: str, directory: str | Path = ".") -> Path:
    """Write the package of a new environment into a new folder `directory/name`, and return that folder.

    Args:
        name: Name of the environment: lower-case words with digits, joined by `-` or `_`.
        directory: The folder in which the package's folder is made; it is made too if need be.

    Raises:
        UserError: The name will not do (as a module's name, or because it is taken), or the folder exists.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"new-env: {name!r} will not do; use lower-case words joined by '-', such as 'number-guess'")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or keyword.issoftkeyword(module) or module in sys.stdlib_module_names:
        raise UserError(f"new-env: {module!r} is a word or a module of Python's own; choose another name")
    if name in short_names() or f"{name}-v0" in env_names():
        raise UserError(f"new-env: an environment {name!r} is installed already; choose another name")
    root = Path(directory) / name
    if root.exists():
        raise UserError(f"new-env: {root} exists already; nothing was written")
    spec = find_spec(module)
    if spec is not None and spec.origin is not None:  # any folder on the path counts as a module, without an origin
        raise UserError(f"new-env: a module {module!r} is installed already; choose another name")
    class_name = "".join(word.capitalize() for word in module.split("_")) + "Env"
    words = {"@NAME@": name, "@MODULE@": module, "@CLASS@": class_name}
    try:
        for path, text in _FILES.items():
            for word, value in words.items():
                path, text = path.replace(word, value), text.replace(word, value)
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"new-env: cannot write {error.filename}: {error.strerror}") from None
    return root


_PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "@NAME@"
version = "0.1.0"
description = "The environment @NAME@ for stepgym."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["stepgym"]

[project.entry-points."stepgym.envs"]
"@NAME@-v0" = "@MODULE@.env:@CLASS@"

[tool.hatch.build.targets.wheel]
packages = ["@MODULE@"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

_INIT = '''"""The environment @NAME@ for stepgym."""
'''

_ENV = '''"""The environment: replace the guessing game by your own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepgym import Message, Task, ToolEnv, tool
from stepgym.env.messages import tool_call, user
from stepgym.seeds import derive_seed


class @CLASS@(ToolEnv):
    """Find a hidden number with as few guesses as possible.

    Args:
        highest: The hidden number lies between 1 and this.
        max_turns: Turns before the episode is cut off.
    """

    splits = ("train", "validation", "test")

    def __init__(self, *, highest: int = 100, max_turns: int = 8) -> None:
        self.highest = highest
        self.max_turns = max_turns

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per number; each number belongs to one split, so that test numbers are never trained on."""
        prompt = f"I think of a number from 1 to {self.highest}. Find it with the tool `guess`."
        return [
            Task(id=str(number), prompt=prompt, answer=number)
            for number in range(1, self.highest + 1)
            if self.splits[derive_seed("@NAME@", number) % len(self.splits)] == split
        ]

    def begin(self, task: Task) -> list[Message]:
        """Reset what belongs to one episode, and return the first messages."""
        self.guesses = 0
        self.found = False
        return [user(task.prompt)]

    @tool
    def guess(self, number: int) -> str:
        """Try a number.

        Args:
            number: The number to try.
        """
        self.guesses += 1
        if number == self.task.answer:
            self.found = True
            self.finish()
            return "right"
        return "too low" if number < self.task.answer else "too high"

    def score(self) -> float:
        """1 for the right number, 0 otherwise. A dict of named parts works too; they are summed."""
        return float(self.found)

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        """Solve a task by bisection. It makes warm starts and the environment's own tests possible."""
        low, high = 1, self.highest
        while low <= high:
            middle = (low + high) // 2
            yield tool_call("guess", number=middle)
            low, high = (middle + 1, high) if middle < task.answer else (low, middle - 1)
'''

_TEST = '''"""The environment keeps the promises of stepgym, and its expert solves it."""

from __future__ import annotations

import pytest
from stepgym import make
from stepgym.env.check import check_env
from stepgym.env.messages import tool_call
from stepgym.errors import UserError

from @MODULE@.env import @CLASS@


def test_all_checks_pass() -> None:
    report = check_env(@CLASS@)
    assert report.ok, str(report)
    assert not report.warnings, str(report)


def test_the_expert_finds_every_number() -> None:
    env = @CLASS@()
    for task in env.tasks("test"):
        env.reset(seed=0, options={"task": task})
        total = 0.0
        for message in env.expert(task):
            _, reward, terminated, truncated, info = env.step(message)
            total += reward
            if terminated or truncated:
                break
        assert info["success"]
        assert total == 1.0


def test_giving_up_scores_nothing() -> None:
    env = @CLASS@()
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("I give up.")
    assert terminated
    assert reward == 0.0
    assert not info["success"]


def test_an_argument_of_the_wrong_type_is_the_agents_mistake() -> None:
    env = @CLASS@()
    env.reset(seed=0)
    observation, _, terminated, _, info = env.step(tool_call("guess", number="five"))
    assert not terminated
    assert info["action_status"] == "malformed"
    assert observation[0]["role"] == "tool"


def test_an_unknown_field_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean 'highest'"):
        make(@CLASS@, higest=10)
'''

_README = """# @NAME@

An environment for [stepgym](https://pypi.org/project/stepgym/): the agent finds a hidden number with the tool `guess`.

```
pip install -e .
pytest
stepgym check-env @NAME@
stepgym eval --env @NAME@ --model NAME --base-url URL
```

| field | default | meaning |
|---|---|---|
| `highest` | 100 | the hidden number lies between 1 and this |
| `max_turns` | 8 | turns before the episode is cut off |

The reward is 1 when the number was found, 0 otherwise. Every number belongs to exactly one of the splits `train`,
`validation` and `test`.
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    "@MODULE@/__init__.py": _INIT,
    "@MODULE@/env.py": _ENV,
    "@MODULE@/py.typed": "",
    "tests/test_@MODULE@.py": _TEST,
}
