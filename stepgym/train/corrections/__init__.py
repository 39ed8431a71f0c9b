"""Weights for the gap between sampler and trainer, found by name in `CORRECTIONS`.

A correction is a function of a `Tokens` and keyword-only options that returns a `TokenWeights`. It is taken from
pi_old, mu and the advantages, before the update, without gradient. `@CORRECTIONS.register("mine")` adds one;
`module:function` works without registering. Looking at the registry imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.train.losses.tokens import CorrectionFunction

CORRECTIONS: Registry[CorrectionFunction] = Registry(
    "correction",
    {
        name: f"stepgym.train.corrections.{name}:{name}"
        for name in ("truncated", "sequence_truncated", "masked", "geometric_mask")
    },
    group="stepgym.corrections",
)

__all__ = ["CORRECTIONS"]
