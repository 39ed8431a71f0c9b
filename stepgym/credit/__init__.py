"""Rewards to advantages: one small file per estimator, found by name in `CREDITS`.

An estimator is a function that takes a `GroupRewards` and keyword-only options and returns one float64 array per
member with one advantage per step. `@CREDITS.register("mine")` adds one; `module:function` works without registering.
"""

from __future__ import annotations

from stepgym.credit.refused import CreditRegistry

CREDITS = CreditRegistry(
    "credit",
    {
        "grpo": "stepgym.credit.grpo:grpo",
        "rloo": "stepgym.credit.rloo:rloo",
        "maxrl": "stepgym.credit.maxrl:maxrl",
        "turn_returns": "stepgym.credit.turn_returns:turn_returns",
    },
    group="stepgym.credits",
)

__all__ = ["CREDITS"]
