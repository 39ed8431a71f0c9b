"""The check that needs the model: sampled against recomputed logprobs. `stepgym.inspect.audit.gap` makes it."""

from __future__ import annotations

from stepgym.inspect.audit.check import declare

LOGPROB_GAP = declare(
    "logprob_gap",
    "The logprobs that were recorded are those that the model gives the sampled tokens.",
    needs="model",
).name
