"""Losses per trained token, found by name in `LOSSES`; KL estimators in `KLS`.

A loss is a function of a `Tokens` and keyword-only options that returns a `TokenLoss`. `@LOSSES.register("mine")` adds
one; `module:function` works without registering. Looking at a registry imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.train.losses.tokens import KLFunction, LossFunction

_ROOM = "stepgym.train.losses"

LOSSES: Registry[LossFunction] = Registry(
    "loss",
    {name: f"{_ROOM}.{name}:{name}" for name in ("ppo", "gspo", "cispo", "sapo", "reinforce")}
    | {"cross_entropy": f"{_ROOM}.cross_entropy:filtered_cross_entropy"},
    group="stepgym.losses",
)
KLS: Registry[KLFunction] = Registry("KL estimator", {name: f"{_ROOM}.kl:{name}" for name in ("k1", "k2", "k3")})

__all__ = ["KLS", "LOSSES"]
