"""Weights for the gap between sampler and trainer, found by name in `CORRECTIONS`.

A correction is a function of a `Tokens` and keyword-only options that returns a `TokenWeights`. It is taken from pi_old
and mu alone, before the update, without gradient. `@CORRECTIONS.register("mine")` adds one; `module:function` works
without registering. Looking at the registry imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.train.losses.tokens import CorrectionFunction

CORRECTIONS: Registry[CorrectionFunction] = Registry(
    "correction", {"truncated": "stepgym.train.corrections.truncated:truncated"}, group="stepgym.corrections"
)

__all__ = ["CORRECTIONS"]
