"""Rewards to advantages: one small file per estimator, found by name in `CREDITS`.

An estimator is a function that takes a `GroupRewards` and keyword-only options and returns one float64 array per
member with one advantage per step. Declared with `@over_batch` it takes all groups of a batch together, and with
`@over_tokens` the values of a critic (see `stepgym.credit.level`). `@CREDITS.register("mine")` adds one;
`module:function` works without registering.
"""

from __future__ import annotations

from stepgym.credit.refused import CreditRegistry

CREDITS = CreditRegistry(
    "credit",
    {
        "grpo": "stepgym.credit.grpo:grpo",
        "dr_grpo": "stepgym.credit.dr_grpo:dr_grpo",
        "rloo": "stepgym.credit.rloo:rloo",
        "maxrl": "stepgym.credit.maxrl:maxrl",
        "reinforce": "stepgym.credit.reinforce:reinforce",
        "reinforce_plus_plus": "stepgym.credit.reinforce_plus_plus:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "stepgym.credit.reinforce_plus_plus:reinforce_plus_plus_baseline",
        "turn_returns": "stepgym.credit.turn_returns:turn_returns",
        "step_rewards": "stepgym.credit.step_rewards:step_rewards",
        "gigpo": "stepgym.credit.gigpo:gigpo",
        "gae": "stepgym.credit.gae:gae",
    },
    group="stepgym.credits",
)

__all__ = ["CREDITS"]
