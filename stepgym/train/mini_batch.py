"""Whole groups that make one update: their trained tokens, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.credit.group import Advantages, GroupRewards
from stepgym.credit.treatment import Group
from stepgym.train.losses.tokens import Tokens
from stepgym.train.packs.batch import Batch, make_batch
from stepgym.train.packs.micro_batch import MicroBatch
from stepgym.train.policy import Policy


@dataclass(slots=True, eq=False)
class Signal:
    """A group with its advantages.

    Attributes:
        group: The group.
        rewards: What the estimator was given: after treatment, and after the KL where that is a part of the reward.
        advantages: What it returned; empty before.
        informative: Whether the group can teach anything.
        trained: Whether it is trained on.
    """

    group: Group
    rewards: GroupRewards
    advantages: Advantages = field(default_factory=list)
    informative: bool = True
    trained: bool = True


@dataclass(slots=True, eq=False)
class MiniBatch:
    """Tensors [M] have an entry for each trained token of the whole mini-batch, on the policy's device, on every rank.

    Attributes:
        signals: The groups, in the order in which their tokens are numbered.
        batch: Trained tokens and paths of the groups.
        micro_batches: This rank's share of them; empty where there is nothing to train on.
        step, trajectory, group: int64 [M].
        sampler_logprob: [M]; NaN where absent or not comparable.
        advantage: [M]; None before credit.
        values: [M], the critic's before the batch's first update; None without a critic.
        returns: [M], what the critic should have said; None without one.
        weight: [M], of each token in the reduction. None before that.
        correction: [M], what the loss of each token, without the KL, is multiplied with; None where there is no
            correction, or where it is taken with each micro-batch.
        old_logprob: [M], or None where the current log-probability is the old one.
        reference_logprob: [M], or None without a KL term.
        measured: Tensors [M] by name: metrics of what was computed before the first update.
    """

    signals: Sequence[Signal]
    batch: Batch
    micro_batches: list[MicroBatch]
    step: torch.Tensor
    trajectory: torch.Tensor
    group: torch.Tensor
    sampler_logprob: torch.Tensor
    advantage: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    old_logprob: torch.Tensor | None = None
    reference_logprob: torch.Tensor | None = None
    measured: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy, signals: Sequence[Signal]) -> MiniBatch:
        """Lay out some groups. Raises `UserError` for records that cannot be trained on."""
        batch = make_batch([[member.trajectory for member in signal.group.members] for signal in signals])
        tokens, device = batch.tokens, policy.device
        return cls(
            signals=signals,
            batch=batch,
            micro_batches=policy.micro_batches(batch),
            step=_tensor(tokens.step, device),
            trajectory=_tensor(tokens.trajectory, device),
            group=_tensor(tokens.group, device),
            sampler_logprob=_tensor(tokens.sampler_logprob, device),
        )

    def __len__(self) -> int:
        return len(self.batch.tokens)

    def only(self, policy: Policy, wanted: Sequence[bool]) -> MiniBatch:
        """The same with some of the groups only; what is known of their tokens stays known."""
        if all(wanted):
            return self
        kept = MiniBatch.of(policy, [signal for signal, want in zip(self.signals, wanted, strict=True) if want])
        chosen = torch.tensor(list(wanted), dtype=torch.bool, device=policy.device)[self.group]
        for name in ("advantage", "weight", "old_logprob", "reference_logprob"):
            known = getattr(self, name)
            setattr(kept, name, None if known is None else known[chosen])
        return kept

    def per_step(self, values: torch.Tensor) -> list[list[NDArray[np.float64]]]:
        """Sums of a tensor [M] over the trained tokens of each step: per group, per member, float64 [steps]."""
        sums = np.bincount(self.batch.tokens.step, _array(values), self.batch.steps).astype(np.float64)
        counts = [[len(rewards) for rewards in signal.rewards.step_rewards] for signal in self.signals]
        members = iter(np.split(sums, np.cumsum([count for group in counts for count in group])))
        return [[next(members) for _ in group] for group in counts]

    def set_advantages(self, device: torch.device) -> None:
        """Give each trained token the advantage of its step."""
        steps = [np.zeros(0), *(values for signal in self.signals for values in signal.advantages)]
        self.advantage = _tensor(np.concatenate(steps)[self.batch.tokens.step], device)

    def tokens(
        self, logprob: torch.Tensor, old_logprob: torch.Tensor, chosen: torch.Tensor | slice = slice(None)
    ) -> Tokens:
        """What a loss or a correction is given about some trained tokens; all of them by default.

        Args:
            logprob, old_logprob: Of the chosen tokens.
            chosen: Their numbers.
        """
        assert self.advantage is not None
        return Tokens(
            logprob=logprob,
            old_logprob=old_logprob,
            advantage=self.advantage[chosen].to(old_logprob.dtype),
            step=self.step[chosen],
            trajectory=self.trajectory[chosen],
            group=self.group[chosen],
            sampler_logprob=self.sampler_logprob[chosen].to(old_logprob.dtype),
        )


def _tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _array(values: torch.Tensor) -> NDArray[np.float64]:
    return np.asarray(values.detach().double().cpu().numpy())
