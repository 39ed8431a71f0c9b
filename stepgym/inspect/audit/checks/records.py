"""Checks of rows as they lie in the store, before they are trajectories. `stepgym.inspect.audit.rows` makes them."""

from __future__ import annotations

from stepgym.inspect.audit.check import declare

LENGTHS = declare("token_lengths", "Loss mask and logprobs have one entry for each token of the response.").name
UNREADABLE = declare("unreadable_record", "Every stored row is a trajectory; deltas refer to what is there.").name
DUPLICATE = declare(
    "duplicate_trajectory", "Each trajectory is stored once, and no two samples of a group are one."
).name
