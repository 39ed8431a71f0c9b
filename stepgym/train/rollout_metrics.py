"""What the rollouts of an iteration were like, before any treatment: numbers for `metrics.jsonl`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from stepgym.record.outcome import Fault
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory

_LOST = (Fault.INFRASTRUCTURE, Fault.ENVIRONMENT)


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Numbers about the final attempts among `trajectories`, as the environment left them.

    What there is nothing to take a mean over is left out, `episodes` and the counts by outcome aside.

    - `episodes`, `outcome/OUTCOME`: counts; `reward/OUTCOME`: mean raw reward of those with a reward;
    - `reward_part/NAME`: mean over the episodes with a reward, a missing part counts 0;
    - `failed_rate`: share of episodes lost to infrastructure or environment; `retried_rate`: share that stands after
      at least one failed attempt;
    - `turns_mean`, `turns_max`, `episode_tokens_mean`, `episode_tokens_max` (sampled tokens): per episode;
    - `response_tokens_mean`, `response_tokens_max`, `prompt_tokens_mean`, `prompt_tokens_max`: per turn;
    - `truncated_rate`, `malformed_rate`, `invalid_tool_call_rate`, `parse_failure_rate` (malformed, or with a call
      that does not parse), `no_action_rate`: shares of turns; `tool_call_rate`: share of the turns of episodes in
      which tools were on offer;
    - `sampler_entropy`: mean of -logprob over sampled tokens, in nats: an estimate of the entropy that costs nothing.

    Args:
        trajectories: The episodes of an iteration; attempts that are not final are ignored.
    """
    final = [trajectory for trajectory in trajectories if trajectory.final]
    outcomes = Counter(str(trajectory.outcome) for trajectory in final)
    metrics: dict[str, float] = {"episodes": float(len(final))}
    metrics |= {f"outcome/{name}": float(count) for name, count in sorted(outcomes.items())}
    if not final:
        return metrics
    metrics["failed_rate"] = _mean([trajectory.outcome.fault in _LOST for trajectory in final])
    metrics["retried_rate"] = _mean([trajectory.id.attempt > 0 for trajectory in final])
    metrics |= _rewards(final)
    metrics |= _spread("turns", [len(trajectory.steps) for trajectory in final])
    metrics |= _spread("episode_tokens", [sum(map(_response_tokens, trajectory.steps)) for trajectory in final])
    metrics |= _turns(final)
    return metrics


def _rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean raw reward by outcome, and the means of its parts."""
    by_outcome: defaultdict[str, list[float]] = defaultdict(list)
    parts: defaultdict[str, float] = defaultdict(float)
    scored = 0
    for trajectory in trajectories:
        if trajectory.reward is None:
            continue
        scored += 1
        by_outcome[str(trajectory.outcome)].append(trajectory.reward)
        for name, value in trajectory.reward_parts.items():
            parts[name] += value
    metrics = {f"reward/{name}": _mean(rewards) for name, rewards in sorted(by_outcome.items())}
    return metrics | {f"reward_part/{name}": parts[name] / scored for name in sorted(parts)}


def _turns(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What the turns were like."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if not steps:
        return {}
    malformed = [step.status == "malformed" for step in steps]
    invalid = [bool((step.message or {}).get("invalid_tool_calls")) for step in steps]
    metrics = {
        **_spread("response_tokens", list(map(_response_tokens, steps))),
        **_spread("prompt_tokens", list(map(_prompt_tokens, steps))),
        "truncated_rate": _mean([step.status == "truncated" or step.finish_reason == "length" for step in steps]),
        "malformed_rate": _mean(malformed),
        "invalid_tool_call_rate": _mean(invalid),
        "parse_failure_rate": _mean([one or other for one, other in zip(malformed, invalid, strict=True)]),
        "no_action_rate": _mean([step.status == "no_action" for step in steps]),
    }
    offered = [step for trajectory in trajectories if trajectory.tools for step in trajectory.steps]
    if offered:
        metrics["tool_call_rate"] = _mean([bool((step.message or {}).get("tool_calls")) for step in offered])
    logprobs = [step.logprobs for step in steps if step.logprobs is not None and len(step.logprobs)]
    if logprobs:
        metrics["sampler_entropy"] = -float(np.concatenate(logprobs).mean(dtype=np.float64))
    return metrics


def _response_tokens(step: Step) -> int:
    return int(step.metrics.get("response_tokens", 0)) if step.response_ids is None else len(step.response_ids)


def _prompt_tokens(step: Step) -> int:
    return int(step.metrics.get("prompt_tokens", 0)) if step.prompt_ids is None else len(step.prompt_ids)


def _spread(name: str, values: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": _mean(values), f"{name}_max": float(max(values))}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
