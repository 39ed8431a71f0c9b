"""Losses per trained token, found by name in `LOSSES`; KL estimators in `KLS`.

A loss is a function of a `Tokens` and keyword-only options that returns a `TokenLoss`. `@LOSSES.register("mine")` adds
one; `module:function` works without registering. Looking at a registry imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.train.losses.tokens import KLFunction, LossFunction

LOSSES: Registry[LossFunction] = Registry("loss", {"ppo": "stepgym.train.losses.ppo:ppo"}, group="stepgym.losses")
KLS: Registry[KLFunction] = Registry(
    "KL estimator", {name: f"stepgym.train.losses.kl:{name}" for name in ("k1", "k2", "k3")}
)

__all__ = ["KLS", "LOSSES"]
