"""What a credit estimator declares about itself: what it looks at, and whether it compares within the group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

Level: TypeAlias = Literal["group", "batch", "token"]
"""What one call of an estimator looks at: one group, all groups of a batch, or every trained token of a batch."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_LEVEL = "__stepgym_credit_level__"
_BASELINE = "__stepgym_credit_group_baseline__"


def over_batch(function: FunctionT) -> FunctionT:
    """Declare an estimator that looks at all groups of a batch together.

    It is called once per batch, `function(groups: Sequence[GroupRewards], *, options) -> list[Advantages]`, and
    returns the advantages of each group.
    """
    setattr(function, _LEVEL, "batch")
    return function


def over_tokens(function: FunctionT) -> FunctionT:
    """Declare an estimator that gives each trained token an advantage of its own, from a critic's values.

    It is called once per batch, `function(batch: TokenRewards, *, options) -> TokenAdvantages`; see
    `stepgym.credit.token_rewards`.
    """
    setattr(function, _LEVEL, "token")
    return function


def level(function: Callable[..., Any]) -> Level:
    """What an estimator looks at: as it was declared, else `group`."""
    declared: Level = getattr(function, _LEVEL, "group")
    return declared


def group_baseline(compares: bool, **where: object) -> Callable[[FunctionT], FunctionT]:
    """Declare whether an estimator's advantages are relative to the other members of the group.

    Undeclared, an estimator over one group compares within it, and one over a batch or over tokens does not. It
    decides whether a group of equal rewards, or of one member, has signal (see `stepgym.credit.group.has_signal`).

    Args:
        compares: Whether they are.
        **where: Options for which this holds, as in `@group_baseline(False, normalise="none")`; with other options
            the contrary holds. Without any it always holds.

    Raises:
        ValueError: The estimator has no such option.
    """

    def declare(function: FunctionT) -> FunctionT:
        parameters = inspect.signature(function).parameters
        if odd := [name for name in where if name not in parameters]:
            raise ValueError(f"group_baseline: {getattr(function, '__name__', function)} has no option {odd[0]!r}")
        setattr(function, _BASELINE, (compares, dict(where)))
        return function

    return declare


def has_group_baseline(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether an estimator with these options compares the members of a group with each other."""
    declared = getattr(function, _BASELINE, None)
    if declared is None:
        return level(function) == "group"
    compares, where = declared
    parameters = inspect.signature(function).parameters
    holds = all(options.get(name, parameters[name].default) == value for name, value in where.items())
    return bool(compares) if holds else not compares
