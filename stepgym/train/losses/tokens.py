"""What a loss or a correction is given and what it returns: flat tensors with one entry per trained token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch

from stepgym.errors import UserError
from stepgym.plugins import suggestion

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this of zero before they are exponentiated, so that none becomes infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Trained tokens (occurrences of a token in a step), in any order. All tensors are [M], on one device.

    Attributes:
        logprob: log-probability under the weights being trained, at sampling temperature; carries the gradient. For a
            correction, which is taken before the first update, it is `old_logprob`.
        old_logprob: The same under the weights before the first mini-batch of the batch; no gradient.
        advantage: Advantage of the token's step; under credit by token (`gae`) its own.
        step, trajectory, group: int64 number of the token's step, trajectory and group within the update: the units
            over which sequence losses are taken. Numbers may have gaps. Never a merged sequence.
        sampler_logprob: log mu, the sampler's log-probability as recorded; NaN where absent or not comparable.
    """

    logprob: torch.Tensor
    old_logprob: torch.Tensor
    advantage: torch.Tensor
    step: torch.Tensor
    trajectory: torch.Tensor
    group: torch.Tensor
    sampler_logprob: torch.Tensor

    @classmethod
    def none(cls) -> Tokens:
        """No tokens: what a function is tried with."""
        numbers, units = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        return cls(numbers, numbers, numbers, units, units, units, numbers)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """A loss per token, before importance weights and reduction.

    Attributes:
        values: Tensor [M] with gradient.
        metrics: Tensors [M] without gradient (or bool), averaged over all trained tokens of a batch and logged.
    """

    values: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """What a correction returns: the weight of each token's loss, and which tokens are trained on at all.

    Attributes:
        values: Tensor [M] without gradient, finite, not negative; 0 where `keep` is False.
        keep: bool tensor [M], or None where all are kept. A token that is not kept leaves the numerator and the
            denominator of the reduction. Sequence ratios are still taken over all tokens of their unit.
        metrics: As those of a `TokenLoss`.
    """

    values: torch.Tensor
    keep: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


LossFunction: TypeAlias = Callable[..., TokenLoss]
"""`loss(tokens: Tokens, *, options) -> TokenLoss`."""

KLFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`kl(logprob, reference_logprob) -> values`, all [M]."""

CorrectionFunction: TypeAlias = Callable[..., TokenWeights]
"""`correction(tokens: Tokens, *, options) -> TokenWeights`."""

Unit: TypeAlias = Literal["token", "step", "trajectory", "batch"]
"""Within what a loss or a correction lets one token's value depend on other tokens; `batch` is a whole update."""

F = TypeVar("F", bound=Callable[..., Any])


def couples(unit: Unit) -> Callable[[F], F]:
    """Declare within what a loss or a correction couples tokens: `@couples("token")` means that it does not.

    A function with an option `unit` needs no declaration. One that declares nothing is taken to couple all tokens of
    an update, which is always right and costs a second forward pass where an update takes several micro-batches.
    """
    _check(unit, "couples")

    def declare(function: F) -> F:
        function.__couples__ = unit  # type: ignore[attr-defined]
        return function

    return declare


def unit_of(function: Callable[..., Any], options: Mapping[str, Any]) -> Unit:
    """Within what a loss or a correction couples tokens, given its options.

    It is the value of the option `unit` where the function has one, else what `couples` declared, else `batch`.
    Raises `UserError` where that is none of the units.
    """
    name = getattr(function, "__name__", repr(function))
    parameter = inspect.signature(function).parameters.get("unit")
    if parameter is not None:
        return _check(options.get("unit", parameter.default), name)
    return _check(getattr(function, "__couples__", "batch"), name)


def take_loss(function: LossFunction, tokens: Tokens, options: Mapping[str, Any]) -> TokenLoss:
    """Call a loss. Raises `UserError` where a tensor that it returns has not one entry per token."""
    found = function(tokens, **options)
    _check_shapes("loss", function, tokens, {"values": found.values, **found.metrics})
    return found


def take_weights(function: CorrectionFunction, tokens: Tokens, options: Mapping[str, Any]) -> TokenWeights:
    """Call a correction. Raises `UserError` where a tensor that it returns has not one entry per token."""
    found = function(tokens, **options)
    kept = {} if found.keep is None else {"keep": found.keep}
    _check_shapes("correction", function, tokens, {"values": found.values, **kept, **found.metrics})
    return found


def ratio_of(logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(logprob - other), the log-ratio held within `MAX_LOG_RATIO` of zero."""
    return torch.exp(torch.clamp(logprob - other, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _check_shapes(noun: str, function: Callable[..., Any], tokens: Tokens, found: Mapping[str, torch.Tensor]) -> None:
    # A mean, say, would be spread over all tokens without a word when it is multiplied with their weights.
    for name, tensor in found.items():
        if tensor.shape != tokens.logprob.shape:
            function_name = getattr(function, "__name__", repr(function))
            raise UserError(
                f"{noun} {function_name}: {name!r} has shape {list(tensor.shape)} for {len(tokens.logprob)} tokens; "
                "it must have one entry per token"
            )


def _check(unit: Any, name: str) -> Unit:
    units: tuple[Unit, ...] = get_args(Unit)
    if unit not in units:
        raise UserError(f"{name}: unknown unit {unit!r}{suggestion(unit, units)}; known: {', '.join(units)}")
    found: Unit = unit
    return found
