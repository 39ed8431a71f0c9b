"""What a batch of trajectories came to, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepgym.credit.treatment import OutcomeCounts
from stepgym.train.mini_batch import MiniBatch, Signal
from stepgym.train.parallel.processes import Processes


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one batch of trajectories came to.

    Attributes:
        metrics: Numbers by name; docs/metrics.md says what they mean.
        outcomes: How many samples were kept, masked and dropped, by outcome.
        updates: Updates made from this batch.
    """

    metrics: Mapping[str, float]
    outcomes: OutcomeCounts
    updates: int

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"updates": self.updates, "metrics": dict(self.metrics), "outcomes": self.outcomes.to_dict()}


def batch_metrics(
    signals: Sequence[Signal], mini_batches: Sequence[MiniBatch], processes: Processes
) -> dict[str, float]:
    """What is known of a batch before its first update. Collective.

    `reward_mean`, `reward_std`, `success`, `groups`, `members` are over all members, after treatment; all else is over
    the groups that are trained on.
    """
    members = [member for signal in signals for member in signal.group.members]
    rewards = np.array([member.reward for member in members])
    successes = [member.trajectory.success for member in members if member.trajectory.success is not None]
    batches = [mini.batch for mini in mini_batches]
    steps, sequences = sum(batch.steps for batch in batches), sum(batch.sequences for batch in batches)
    trained = sum(len(batch.tokens) for batch in batches)
    advantage = sum(0.0 if mini.advantage is None else mini.advantage.abs().sum().item() for mini in mini_batches)
    forward = [micro.tokens for mini in mini_batches for micro in mini.micro_batches]
    computed = processes.sum(torch.tensor([sum(forward), len(forward)], device=processes.device)).tolist()
    metrics: dict[str, float] = {
        "groups": len(signals),
        "members": len(members),
        "zero_variance_groups": sum(not signal.informative for signal in signals),
        "advantage_abs_mean": advantage / trained if trained else 0.0,
        "steps": steps,
        "sequences": sequences,
        "merge_ratio": steps / sequences if sequences else 1.0,
        "tokens_trained": trained,
        "tokens_steps": sum(batch.step_tokens for batch in batches),
        "tokens_unique": sum(batch.unique_tokens for batch in batches),
        "tokens_forward": computed[0],
        "micro_batches": computed[1],
    }
    if members:
        metrics |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    if successes:
        metrics["success"] = float(np.mean(successes))
    for batch in batches:
        for reason, number in batch.mismatches.items():
            metrics[f"mismatch/{reason}"] = metrics.get(f"mismatch/{reason}", 0) + number
    return metrics


def outcome_metrics(counts: OutcomeCounts) -> dict[str, float]:
    """How many samples were masked and dropped, in all and by outcome."""
    metrics: dict[str, float] = {}
    for fate in ("masked", "dropped"):
        by_outcome = getattr(counts, fate)
        metrics[fate] = sum(by_outcome.values())
        metrics |= {f"{fate}/{outcome}": number for outcome, number in by_outcome.items()}
    return metrics
