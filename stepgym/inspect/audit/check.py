"""The registry of checks. A check is one or more small functions under one name; its docstring is the promise.

A function looks at one unit (a step, a trajectory, a group of samples, the whole run) and yields a `Fault` for
everything that is wrong with it. It is called for every unit of the run, so it does not repeat work that the views
have done already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from stepgym.inspect.audit.finding import Severity

Level = Literal["step", "trajectory", "group", "run"]
Need = Literal["", "tokenizer", "model"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What a check's function yields.

    Attributes:
        text: One sentence.
        token: Position in the step's prompt + response.
        severity: How bad it is.
        step: Index of the step, where the function looks at more than one.
        trajectory: Where the fault lies, where the function looks at more than one trajectory.
        context: The tokens around it, where only the function can tell them.
    """

    text: str
    token: int | None = None
    severity: Severity = "error"
    step: int | None = None
    trajectory: str | None = None
    context: str = ""


Hook: TypeAlias = Callable[[Any], Iterator[Fault]]
_H = TypeVar("_H", bound=Hook)


@dataclass(slots=True)
class Check:
    """One check.

    Attributes:
        name: What findings and `--fail-on` call it.
        promise: What it checks, in one sentence.
        needs: `tokenizer`, `model`, or nothing: what all of it needs.
        hooks: Its functions, by what they look at.
        partly: The functions that need more than the check: what else they need.
    """

    name: str
    promise: str
    needs: Need = ""
    hooks: dict[Level, Hook] = field(default_factory=dict)
    partly: dict[Level, Need] = field(default_factory=dict)

    def need(self, level: Level) -> Need:
        """What the function for a level needs."""
        return self.partly.get(level, self.needs)


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they are reported."""


def check(level: Level, *, name: str = "", needs: Need = "") -> Callable[[_H], _H]:
    """Registers a function as a check, or as a further function of the check `name`.

    The first sentences of the docstring, up to an empty line, are the check's promise.
    """

    def register(function: _H) -> _H:
        known = CHECKS.get(name or function.__name__)
        if known is None:
            promise = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
            known = CHECKS[name or function.__name__] = Check(name or function.__name__, promise, needs)
        if level in known.hooks:
            raise ValueError(f"check {known.name}: two functions for one {level}")
        known.hooks[level] = function
        if needs != known.needs:
            known.partly[level] = needs
        return function

    return register


def declare(name: str, promise: str, *, needs: Need = "") -> Check:
    """Registers a check that is made where the data is read, not by a function of its own."""
    CHECKS[name] = Check(name, promise, needs)
    return CHECKS[name]
