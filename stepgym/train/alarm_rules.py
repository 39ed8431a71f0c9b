"""What precedes a collapse: one rule per alarm, with what it usually means and what to try.

A rule looks at one number of an iteration's metrics. It is beyond its bounds where at least one of these holds:

- `level`: the number is past this, whatever it was before;
- `jump` and `factor`: it has left the run's recent baseline, the median of the last iterations, by at least `jump`, by
  so many median absolute deviations (`AlarmConfig.deviations`), and it is past `factor` times the baseline;
- `start_factor`: it is past this many times the median of the run's first iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """When an alarm is raised, and what it says.

    Attributes:
        name: Name of the alarm.
        value: The number of a row of metrics; None where the row does not have it.
        shown: How the number is told, as a format of its value.
        means: What it usually means.
        remedy: What to try.
        rises: Whether it is alarming when the number rises, or when it falls.
        level, jump, factor, start_factor: Bounds, see the module; None where one does not apply.
        patience: Iterations in a row that have to be beyond the bounds.
        calm: Rows for which the rule says nothing whatever the number is.
    """

    name: str
    value: Callable[[Row], float | None]
    shown: str
    means: str
    remedy: str
    rises: bool = True
    level: float | None = None
    jump: float | None = None
    factor: float = 1.0
    start_factor: float | None = None
    patience: int = 2
    calm: Callable[[Row], bool] | None = None


def number(row: Row, *names: str) -> float | None:
    """The first of these metrics that the row has as a finite number."""
    for name in names:
        value = row.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None


def _metric(*names: str) -> Callable[[Row], float | None]:
    return lambda row: number(row, *names)


def _share(part: str, *whole: str) -> Callable[[Row], float | None]:
    """`part` as a share of the sum of `whole`; 0 where the part is not there, None where the whole is not."""

    def value(row: Row) -> float | None:
        counts = [number(row, name) for name in whole]
        total = sum(count for count in counts if count is not None)
        return (number(row, part) or 0.0) / total if total > 0 else None

    return value


def _clipped(row: Row) -> float | None:
    low, high = number(row, "clip_fraction_low"), number(row, "clip_fraction_high")
    return None if low is None and high is None else (low or 0.0) + (high or 0.0)


def _grad_norm(row: Row) -> float | None:
    """The gradient's norm where there was an update."""
    return number(row, "grad_norm") if number(row, "updates") else None


def _solved(row: Row) -> bool:
    success = number(row, "success")
    return success is not None and success >= 0.9


RULES: tuple[Rule, ...] = (
    Rule(
        "parse_failures",
        _metric("parse_failure_rate"),
        "{:.0%} of turns do not parse",
        "The policy drifts off the format, or responses are cut off.",
        "Lower the learning rate, add a KL term, or let malformed turns cost reward.",
        jump=0.1,
        level=0.4,
    ),
    Rule(
        "no_actions",
        _metric("no_action_rate"),
        "{:.0%} of turns hold no action",
        "The policy talks instead of acting.",
        "Look at some (stepgym show); lower the learning rate, or let such turns cost reward.",
        jump=0.15,
        level=0.5,
    ),
    Rule(
        "tools_unused",
        _metric("tool_call_rate"),
        "{:.0%} of turns call a tool",
        "The policy stops using its tools: answering at once may pay better than looking.",
        "Check what is rewarded, and that calls still parse (stepgym show).",
        rises=False,
        jump=0.3,
    ),
    Rule(
        "turns_fall",
        _metric("turns_mean"),
        "{:.1f} turns an episode",
        "Episodes end early: giving up may pay as well as trying.",
        "Look at the outcomes, and at what an early end is rewarded with.",
        rises=False,
        jump=1.0,
        factor=0.6,
    ),
    Rule(
        "responses_grow",
        _metric("response_tokens_mean"),
        "{:.0f} tokens a response",
        "Repetition, or a loss that favours length.",
        "Look at some (stepgym show); check `reduction`, try Dr. GRPO's credit or a cost of length.",
        jump=10.0,
        factor=1.5,
    ),
    Rule(
        "responses_shrink",
        _metric("response_tokens_mean"),
        "{:.0f} tokens a response",
        "Reasoning is given up, or short answers are rewarded as much.",
        "Check what is rewarded; lower the learning rate or add a KL term.",
        rises=False,
        jump=5.0,
        factor=0.5,
    ),
    Rule(
        "responses_cut_off",
        _metric("truncated_rate"),
        "{:.0%} of turns are cut off by length",
        "Responses outgrow rollout.max_response_tokens or the context.",
        "Raise the limit, or make length cost reward.",
        jump=0.15,
        level=0.5,
    ),
    Rule(
        "entropy_collapse",
        _metric("sampler_entropy", "entropy"),
        "entropy {:.3f} nats",
        "Samples become alike, so groups carry no signal, before the tasks are solved.",
        "Lower the learning rate, clip higher (DAPO), or add a KL term.",
        rises=False,
        start_factor=0.1,
        patience=3,
        calm=_solved,
    ),
    Rule(
        "entropy_explosion",
        _metric("sampler_entropy", "entropy"),
        "entropy {:.2f} nats",
        "The policy falls apart into noise.",
        "Lower the learning rate, add a KL term, and look at the logprob gap.",
        jump=0.5,
        factor=2.0,
    ),
    Rule(
        "logprob_gap",
        _metric("logprob_gap_mean"),
        "sampler and trainer differ by {:.2g} nats a token",
        "They compute different models: precision, temperature, or stale weights.",
        "Run stepgym audit with the model; sample in the trainer's dtype; keep `correction`.",
        level=0.1,
        jump=0.01,
        factor=3.0,
    ),
    Rule(
        "no_signal",
        _share("zero_variance_groups", "groups"),
        "{:.0%} of groups have equal rewards",
        "Nothing to learn from: tasks are all solved, or all too hard.",
        "Other tasks, more samples a task, or `refill`.",
        level=0.95,
        patience=3,
    ),
    Rule(
        "reward_falls",
        _metric("success"),
        "success {:.2f}",
        "The policy gets worse at what it had learned.",
        "Go back to an earlier checkpoint with a lower learning rate; look at the other alarms.",
        rises=False,
        jump=0.25,
        patience=3,
    ),
    Rule(
        "gradient_spike",
        _grad_norm,
        "gradient norm {:.3g}",
        "A batch unlike the others, or ratios far from 1.",
        "One is harmless under clipping; if they come often, lower the learning rate.",
        jump=1.0,
        factor=10.0,
        patience=1,
    ),
    Rule(
        "gradient_not_finite",
        _metric("nonfinite_updates"),
        "{:.0f} updates skipped for a gradient that is not finite",
        "Overflow, or a degenerate batch.",
        "Lower the learning rate; train in bfloat16 or float32, not float16.",
        level=0.5,
        patience=1,
    ),
    Rule(
        "kl_runs_away",
        _metric("kl"),
        "KL to the reference {:.2g} nats a token",
        "The policy leaves the model that it began as.",
        "Raise kl.coef, or lower the learning rate.",
        level=0.5,
        jump=0.05,
        factor=5.0,
    ),
    Rule(
        "clipping",
        _clipped,
        "{:.0%} of tokens are clipped",
        "Updates move the policy further than the loss trusts.",
        "Fewer mini-batches or epochs, or a lower learning rate.",
        level=0.4,
        patience=3,
    ),
    Rule(
        "episodes_lost",
        _metric("failed_rate"),
        "{:.0%} of episodes lost to infrastructure or environment",
        "Engine or environment fail; what is left may be a biased sample.",
        "Look at the outcomes and their details (stepgym show).",
        level=0.1,
    ),
    Rule(
        "episodes_masked",
        _share("masked", "members", "masked"),
        "{:.0%} of episodes masked",
        "Context or time run out; what is left favours short episodes.",
        "Raise the limits (context, episode_timeout), or make episodes shorter.",
        level=0.4,
    ),
    Rule(
        "episodes_stale",
        _share("stale_dropped", "members", "stale_dropped"),
        "{:.0%} of episodes dropped as stale",
        "Rollouts take longer than the updates that pass meanwhile.",
        "Raise overlap.max_staleness, lower its lookahead, or speed up rollouts.",
        level=0.2,
    ),
)
"""All alarms."""
