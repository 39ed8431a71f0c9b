"""Batches of trajectories in, updates of the policy out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.credit.group import assign, has_signal
from stepgym.credit.treatment import Group, OutcomeCounts, treat
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.trajectory import Trajectory
from stepgym.seeds import derive_seed
from stepgym.train.batch import Batch, MicroBatch, make_batch
from stepgym.train.config import LearnerConfig
from stepgym.train.eligibility import require_trainable
from stepgym.train.losses import KLS
from stepgym.train.losses.reduction import token_weights
from stepgym.train.losses.tokens import Tokens
from stepgym.train.metrics import TokenMetrics
from stepgym.train.optimizer import Optimizer
from stepgym.train.policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one batch of trajectories came to.

    Attributes:
        metrics: Numbers by name (see `Learner.update`).
        outcomes: How many samples were kept, masked and dropped, by outcome.
        updates: Updates made from this batch.
    """

    metrics: Mapping[str, float]
    outcomes: OutcomeCounts
    updates: int

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"updates": self.updates, "metrics": dict(self.metrics), "outcomes": self.outcomes.to_dict()}


@dataclass(slots=True, eq=False)
class MiniBatch:
    """Whole groups that make one update, ready to be computed.

    Attributes:
        batch: Trained tokens and rows of the groups that are trained on.
        micro_batches: The rows, cut and padded.
        advantage: Tensor [M], per trained token.
        weight: Tensor [M] that sums to 1 (see `token_weights`).
        sampler_logprob: Tensor [M]; NaN where absent or not comparable.
        step, trajectory, group: int64 tensors [M].
        old_logprob: Tensor [M], or None where the current log-probability is the old one.
        reference_logprob: Tensor [M], or None without a KL term.
    """

    batch: Batch
    micro_batches: list[MicroBatch]
    advantage: torch.Tensor
    weight: torch.Tensor
    sampler_logprob: torch.Tensor
    step: torch.Tensor
    trajectory: torch.Tensor
    group: torch.Tensor
    old_logprob: torch.Tensor | None = None
    reference_logprob: torch.Tensor | None = None


@dataclass(slots=True)
class _Signal:
    """A group with its advantages."""

    group: Group
    advantages: list[NDArray[np.float64]] = field(default_factory=list)
    trained: bool = True


class Learner:
    """Learns from batches of trajectories.

    A batch goes through treatment (which outcomes count, with which reward), credit (rewards to one advantage per
    step), mini-batches of whole groups, and for each mini-batch one update: forward and backward by micro-batches,
    clipping, AdamW.

    Args:
        policy: The model that is trained, in place.
        config: The algorithm and its settings.
        reference: The frozen policy of the KL term; where none is given, a copy of `policy` as it is now, or with an
            adapter the model without it. Not kept without a KL term.

    Attributes:
        updates: Updates made so far.
        batches: Batches learned from so far.
    """

    def __init__(self, policy: Policy, config: LearnerConfig, reference: Policy | None = None) -> None:
        self.policy = policy
        self.config = config
        self.reference = None if config.kl.kind == "none" else reference or policy.frozen_copy()
        self.optimizer = Optimizer(policy.model.parameters(), config.optimizer, config.total_updates)
        self.batches = 0
        self._credit = config.function("credit")
        self._loss = config.function("loss")
        self._correction = None if config.correction.kind == "none" else config.function("correction")
        self._kl = None if config.kl.kind == "none" else KLS.get(config.kl.kind)

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self.optimizer.updates

    def update(self, trajectories: Iterable[Trajectory], outcomes: OutcomePolicy | None = None) -> UpdateReport:
        """Learn from one batch of trajectories.

        Makes `mini_batches * epochs` updates, fewer where there are fewer groups or a mini-batch has no group with
        signal. Metrics, over the groups trained on unless said otherwise (means are over trained tokens; what there is
        nothing to take a mean over is left out):

        - `reward_mean`, `reward_std`, `success`: over all members, after treatment;
        - `groups`, `members`, `masked`, `dropped`, `zero_variance_groups`, `masked/OUTCOME`, `dropped/OUTCOME`;
        - `loss`, `kl`, `ratio`, `clip_fraction_low`, `clip_fraction_high`, `importance_weight`, `entropy`, ...: means;
          `ratio_max`, `advantage_abs_mean`;
        - `logprob_gap_mean`, `logprob_gap_max`: |sampler - trainer| before the first update, where comparable;
        - `grad_norm` (before clipping, mean over updates), `learning_rate` (of the last update);
        - `tokens_trained`, `tokens_forward` (with padding), `tokens_rows` (without), `tokens_steps` (one step at a
          time), `steps`, `rows`, `merge_ratio` (steps per row), `mismatch/REASON`;
        - `update` (number of updates so far), `updates`, `skipped_updates` (no signal, or a gradient that was not
          finite), `seconds`.

        Args:
            trajectories: One batch; the order does not matter. Attempts that are not final are ignored.
            outcomes: What each outcome means for training.

        Raises:
            UserError: A record cannot be trained on (see `require_trainable`).
        """
        started = time.perf_counter()
        groups, counts = treat(trajectories, outcomes or OutcomePolicy())
        mini_batches, metrics = self.prepare(groups)
        with self.policy.training():
            self._before_first_update(mini_batches)
            tokens, norms, made = TokenMetrics(), [], 0
            rate = self.optimizer.learning_rate
            skipped = sum(not mini.micro_batches for mini in mini_batches) * self.config.epochs
            for _ in range(self.config.epochs):
                for mini in mini_batches:
                    if not mini.micro_batches:
                        continue
                    tokens.merge(self.backward(mini))
                    rate = self.optimizer.learning_rate
                    norm = self.optimizer.step()
                    if math.isfinite(norm):
                        norms.append(norm)
                        made += 1
                    else:
                        skipped += 1
                        logger.warning("update %d skipped: the gradient's norm is %s", self.updates, norm)
        self.batches += 1
        metrics |= tokens.means()
        metrics |= {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "learning_rate": rate,
            "update": self.updates,
            "updates": made,
            "skipped_updates": skipped,
            "seconds": time.perf_counter() - started,
        }
        metrics |= _outcome_metrics(counts)
        return UpdateReport(metrics, counts, made)

    def prepare(self, groups: Sequence[Group]) -> tuple[list[MiniBatch], dict[str, float]]:
        """Credit and mini-batches: all that comes before the first forward pass.

        Returns:
            The mini-batches, in the order of their updates; one whose groups have no signal has no micro-batches. And
            the metrics that are known by now.

        Raises:
            UserError: A record cannot be trained on.
        """
        members = [member.trajectory for group in groups for member in group.members]
        require_trainable(members, correction=self._correction is not None)
        signals = [self._signal(group) for group in groups]
        mini_batches = [self._mini_batch(part) for part in self._split(signals)]
        return mini_batches, _batch_metrics(signals, mini_batches)

    def backward(self, mini: MiniBatch) -> TokenMetrics:
        """Add the gradient of a mini-batch's loss to the parameters' gradients. Returns metrics of its tokens."""
        metrics = TokenMetrics()
        for micro_batch in mini.micro_batches:
            scores = self.policy.score(micro_batch, entropy=self.config.entropy)
            chosen = micro_batch.token.to(self.policy.device)
            current = scores.logprob.detach()
            old = current if mini.old_logprob is None else mini.old_logprob[chosen]
            tokens = Tokens(
                logprob=scores.logprob,
                old_logprob=old,
                advantage=mini.advantage[chosen].to(current.dtype),
                step=mini.step[chosen],
                trajectory=mini.trajectory[chosen],
                group=mini.group[chosen],
                sampler_logprob=mini.sampler_logprob[chosen].to(current.dtype),
            )
            loss = self._loss(tokens, **self.config.loss.options)
            values = loss.values
            metrics.add(loss.metrics)
            if self._correction is not None:
                correction = self._correction(tokens, **self.config.correction.options)
                values = values * correction.values.detach()
                metrics.add(correction.metrics)
            if self._kl is not None and mini.reference_logprob is not None:
                kl = self._kl(scores.logprob, mini.reference_logprob[chosen])
                values = values + self.config.kl.coef * kl
                metrics.add({"kl": kl.detach()})
            total = (values * mini.weight[chosen].to(current.dtype)).sum()
            total.backward()
            metrics.add_loss(total.detach())
            metrics.add_gap(old, tokens.sampler_logprob)
            if scores.entropy is not None:
                metrics.add({"entropy": scores.entropy})
            metrics.count(len(chosen))
        metrics.close()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the weights that the next update depends on."""
        return {"optimizer": self.optimizer.state_dict(), "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was called."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches = state["batches"]

    # ---- within -------------------------------------------------------------------------------------------------

    def _signal(self, group: Group) -> _Signal:
        rewards = group.rewards
        advantages = assign(self._credit, rewards, self.config.credit.options)
        trained = self.config.zero_variance == "keep" or has_signal(rewards, advantages)
        return _Signal(group, advantages, trained)

    def _split(self, signals: Sequence[_Signal]) -> list[list[_Signal]]:
        """Whole groups per mini-batch. Which ones share one is drawn anew for each batch, from the seed."""
        count = min(self.config.mini_batches, len(signals))
        if count <= 1:
            return [list(signals)] if signals else []
        order = np.random.default_rng(derive_seed(self.config.seed, "mini_batches", self.batches)).permutation(
            len(signals)
        )
        return [[signals[index] for index in sorted(part)] for part in np.array_split(order, count)]

    def _mini_batch(self, signals: Sequence[_Signal]) -> MiniBatch:
        trained = [signal for signal in signals if signal.trained]
        batch = make_batch(
            [[member.trajectory for member in signal.group.members] for signal in trained], rows=self.config.rows
        )
        tokens = batch.tokens
        per_step = np.concatenate([np.zeros(0), *(steps for signal in trained for steps in signal.advantages)])
        weight = token_weights(
            self.config.reduction, step=tokens.step, trajectory=tokens.trajectory, group=tokens.group
        )
        return MiniBatch(
            batch=batch,
            micro_batches=self.policy.micro_batches(batch),
            advantage=self._tensor(per_step[tokens.step]),
            weight=self._tensor(weight),
            sampler_logprob=self._tensor(tokens.sampler_logprob),
            step=self._tensor(tokens.step),
            trajectory=self._tensor(tokens.trajectory),
            group=self._tensor(tokens.group),
        )

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.policy.device)

    def _before_first_update(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Compute pi_old and the reference while the weights have not moved yet."""
        for mini in mini_batches:
            count = len(mini.batch.tokens)
            if self.config.old_logprobs_needed or self.policy.noisy:
                mini.old_logprob = self.policy.logprobs(mini.micro_batches, count)
            if self.reference is not None:
                mini.reference_logprob = self.reference.logprobs(mini.micro_batches, count)


def _batch_metrics(signals: Sequence[_Signal], mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
    members = [member for signal in signals for member in signal.group.members]
    rewards = np.array([member.reward for member in members])
    successes = [member.trajectory.success for member in members if member.trajectory.success is not None]
    batches = [mini.batch for mini in mini_batches]
    steps, rows = sum(batch.steps for batch in batches), sum(len(batch.rows) for batch in batches)
    advantages = [mini.advantage.abs().sum().item() for mini in mini_batches]
    trained = sum(len(batch.tokens) for batch in batches)
    metrics: dict[str, float] = {
        "groups": len(signals),
        "members": len(members),
        "zero_variance_groups": sum(not has_signal(signal.group.rewards, signal.advantages) for signal in signals),
        "advantage_abs_mean": sum(advantages) / trained if trained else 0.0,
        "steps": steps,
        "rows": rows,
        "merge_ratio": steps / rows if rows else 1.0,
        "tokens_trained": trained,
        "tokens_rows": sum(batch.row_tokens for batch in batches),
        "tokens_steps": sum(batch.step_tokens for batch in batches),
        "tokens_forward": sum(micro.ids.numel() for mini in mini_batches for micro in mini.micro_batches),
    }
    if members:
        metrics |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    if successes:
        metrics["success"] = float(np.mean(successes))
    for batch in batches:
        for reason, number in batch.mismatches.items():
            metrics[f"mismatch/{reason}"] = metrics.get(f"mismatch/{reason}", 0) + number
    return metrics


def _outcome_metrics(counts: OutcomeCounts) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for fate in ("masked", "dropped"):
        by_outcome = getattr(counts, fate)
        metrics[fate] = sum(by_outcome.values())
        metrics |= {f"{fate}/{outcome}": number for outcome, number in by_outcome.items()}
    return metrics
