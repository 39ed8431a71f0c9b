"""The checks, by what they look at. Importing this registers all of them, in the order in which they are reported."""

# ruff: noqa: I001
from __future__ import annotations

from stepgym.inspect.audit.checks import (  # noqa: F401
    records,
    tokens,
    sampling,
    limits,
    prompts,
    observations,
    turns,
    outcomes,
    rewards,
    weights,
    groups,
    model,
)
