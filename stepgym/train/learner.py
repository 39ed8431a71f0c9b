"""Batches of trajectories in, updates of the policy out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stepgym.credit.group import assign_all, has_signal
from stepgym.credit.kl_in_reward import lower_rewards
from stepgym.credit.token_rewards import require_chains
from stepgym.credit.treatment import Group, treat
from stepgym.errors import UserError
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.trajectory import Trajectory
from stepgym.seeds import derive_seed
from stepgym.train.config import WHOLE_UNITS, LearnerConfig
from stepgym.train.critic import Critic
from stepgym.train.eligibility import require_trainable
from stepgym.train.losses import KLS
from stepgym.train.losses.tokens import take_loss, take_weights, unit_of
from stepgym.train.metrics import TokenMetrics
from stepgym.train.mini_batch import MiniBatch, Signal
from stepgym.train.optimizer import Optimizer
from stepgym.train.policy import Policy
from stepgym.train.token_credit import ValueMetrics, assign_by_token
from stepgym.train.update_report import UpdateReport, batch_metrics, outcome_metrics

logger = logging.getLogger(__name__)


class Learner:
    """Learns from batches of trajectories.

    A batch goes through treatment (which outcomes count, with which reward), credit (rewards to one advantage per
    step), mini-batches of whole groups, and for each mini-batch one update: forward and backward by micro-batches,
    clipping, AdamW. Where there are several processes, all of them are given the same batch and do the same, except
    that each computes its share of the micro-batches.

    Args:
        policy: The model that is trained, in place.
        config: The algorithm and its settings.
        reference: The frozen policy of the KL term; where none is given, a copy of `policy` as it is now, or with an
            adapter the model without it. Not kept without a KL term.

    Attributes:
        critic: Gives values, where credit is by token; else None.
        updates: Updates made so far.
        batches: Batches learned from so far.
    """

    def __init__(self, policy: Policy, config: LearnerConfig, reference: Policy | None = None) -> None:
        self.policy = policy
        self.config = config
        self.reference = None if config.kl.kind == "none" else reference or policy.frozen_copy()
        self.critic = None
        if config.critic is not None:
            seed = derive_seed(config.seed, "critic")
            self.critic = Critic(policy, config.critic, config.critic_updates, seed=seed)
        self.optimizer = Optimizer(policy.model.named_parameters(), config.optimizer, config.total_updates)
        self.batches = 0
        self._credit = config.function("credit")
        self._loss = config.function("loss")
        self._correction = None if config.correction.kind == "none" else config.function("correction")
        self._kl = None if config.kl.kind == "none" else KLS.get(config.kl.kind)
        self._coupled = unit_of(self._loss, config.loss.options) not in WHOLE_UNITS
        self._moved = False  # whether the weights are no longer those of pi_old

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self.optimizer.updates

    def update(self, trajectories: Iterable[Trajectory], outcomes: OutcomePolicy | None = None) -> UpdateReport:
        """Learn from one batch of trajectories.

        Makes `mini_batches * epochs` updates, fewer where there are fewer groups or a mini-batch has no group with
        signal, and none while only the critic learns. docs/metrics.md says what the metrics mean.

        Args:
            trajectories: One batch; the order does not matter. Attempts that are not final are ignored.
            outcomes: What each outcome means for training.

        Raises:
            UserError: A record cannot be trained on (see `require_trainable`).
        """
        started = time.perf_counter()
        groups, counts = treat(trajectories, outcomes or OutcomePolicy())
        self._moved = False
        with self.policy.training():
            mini_batches, signals = self.prepare(groups)
            metrics = batch_metrics(signals, mini_batches, self.policy.processes)
            tokens, norms, made, skipped, nonfinite = TokenMetrics(), [], 0, 0, 0
            values = ValueMetrics(mini_batches)
            rate = self.optimizer.learning_rate
            for _ in range(self.config.epochs):
                for mini in mini_batches:
                    if not mini.micro_batches:
                        skipped += 1
                        continue
                    if self.critic is not None:
                        values.add(self.critic.update(mini))
                        if self.critic.warms_up(self.batches):
                            continue
                    tokens.merge(self.backward(mini))
                    rate = self.optimizer.learning_rate
                    norm = self.optimizer.step()
                    self._moved = True
                    if math.isfinite(norm):
                        norms.append(norm)
                        made += 1
                    else:
                        skipped += 1
                        nonfinite += 1
                        logger.warning("update %d skipped: the gradient's norm is %s", self.updates, norm)
        self.batches += 1
        metrics |= tokens.means(self.policy.processes) | values.means()
        metrics |= {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "learning_rate": rate,
            "update": self.updates,
            "updates": made,
            "skipped_updates": skipped,
            "nonfinite_updates": nonfinite,
            "seconds": time.perf_counter() - started,
        }
        metrics |= outcome_metrics(counts)
        return UpdateReport(metrics, counts, made)

    def prepare(self, groups: Sequence[Group]) -> tuple[list[MiniBatch], list[Signal]]:
        """All that comes before the first update: credit, mini-batches, pi_old, reference, corrections.

        Returns:
            The mini-batches, in the order of their updates; one whose groups have no signal has no micro-batches. And
            all groups with their advantages.

        Raises:
            UserError: A record cannot be trained on.
        """
        members = [member.trajectory for group in groups for member in group.members]
        require_trainable(members, correction=self._correction is not None)
        signals = [Signal(group, group.rewards) for group in groups]
        parts = self._split(signals)
        if self.critic is not None:
            require_chains(members, self.config.credit.kind)
            mini_batches = [self._scored(MiniBatch.of(self.policy, part)) for part in parts]
            options, cost, coef = self.config.credit.options, self._costs(mini_batches), self.config.kl.coef
            assign_by_token(self._credit, options, mini_batches, self.critic, cost, coef)
        elif self.config.scored_before_credit:
            mini_batches = [self._scored(MiniBatch.of(self.policy, part)) for part in parts]
            self._lower_rewards(mini_batches)
            self._assign(signals)
            mini_batches = [mini.only(self.policy, [s.trained for s in mini.signals]) for mini in mini_batches]
        else:
            self._assign(signals)
            mini_batches = [MiniBatch.of(self.policy, [s for s in part if s.trained]) for part in parts]
            mini_batches = [self._scored(mini) for mini in mini_batches]
        for mini in mini_batches:
            if mini.advantage is None:
                mini.set_advantages(self.policy.device)
            self._weigh(mini)
        return mini_batches, signals

    def backward(self, mini: MiniBatch) -> TokenMetrics:
        """Add the gradient of a mini-batch's loss to the parameters' gradients. Returns metrics of its tokens."""
        metrics = TokenMetrics()
        # Sharding averages gradients over the ranks, and the loss is a sum over what all of them hold.
        ranks = self.policy.processes.size
        slopes = self._slopes(mini, metrics) if self._coupled else None
        for micro_batch in mini.micro_batches:
            scores = self.policy.score(micro_batch, entropy=self.config.entropy)
            chosen = micro_batch.token.to(self.policy.device)
            if slopes is None:
                values, measured = self._objective(mini, scores.logprob, chosen)
                loss = values.sum()
                metrics.add_loss(loss.detach())
                metrics.add(measured)
                old = scores.logprob.detach() if mini.old_logprob is None else mini.old_logprob[chosen]
                metrics.add_gap(old, mini.sampler_logprob[chosen])
            else:
                loss = (slopes[chosen] * scores.logprob).sum()
            (loss * ranks).backward()  # type: ignore[no-untyped-call]
            if scores.entropy is not None:
                metrics.add({"entropy": scores.entropy})
            metrics.count(len(chosen))
        metrics.close()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the policy's weights that the next update depends on."""
        state = {"optimizer": self.optimizer.state_dict(), "batches": self.batches}
        return state if self.critic is None else state | {"critic": self.critic.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was called."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches = state["batches"]
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])

    # ---- before the first update ------------------------------------------------------------------------------------

    def _split(self, signals: Sequence[Signal]) -> list[list[Signal]]:
        """Whole groups per mini-batch. Which ones share one is drawn anew for each batch, from the seed."""
        count = min(self.config.mini_batches, len(signals))
        if count <= 1:
            return [list(signals)] if signals else []
        seed = derive_seed(self.config.seed, "mini_batches", self.batches)
        order = np.random.default_rng(seed).permutation(len(signals))
        return [[signals[index] for index in sorted(part)] for part in np.array_split(order, count)]

    def _scored(self, mini: MiniBatch) -> MiniBatch:
        """With pi_old and the reference, where they are needed."""
        if self.config.old_logprobs_needed or self.policy.noisy:
            mini.old_logprob = self.policy.logprobs(mini.micro_batches, len(mini))
        if self.reference is not None:
            mini.reference_logprob = self.reference.logprobs(mini.micro_batches, len(mini))
        return mini

    def _lower_rewards(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Take the KL to the reference from the rewards, where it is a part of them."""
        for mini, costs in zip(mini_batches, self._costs(mini_batches) or (), strict=True):
            for signal, steps in zip(mini.signals, mini.per_step(costs), strict=True):
                signal.rewards = lower_rewards(signal.rewards, steps, self.config.kl.coef)

    def _costs(self, mini_batches: Sequence[MiniBatch]) -> list[torch.Tensor] | None:
        """The KL to the reference at each token, [M], per mini-batch; None where it is no part of the reward."""
        if self._kl is None or self.config.kl.applies_to != "reward":
            return None
        costs = []
        for mini in mini_batches:
            assert mini.old_logprob is not None
            assert mini.reference_logprob is not None
            costs.append(self._kl(mini.old_logprob, mini.reference_logprob))
        return costs

    def _assign(self, signals: Sequence[Signal]) -> None:
        """Credit: advantages for all groups of the batch."""
        options = self.config.credit.options
        found = assign_all(self._credit, [signal.rewards for signal in signals], options)
        for signal, advantages in zip(signals, found, strict=True):
            signal.advantages = advantages
            signal.informative = has_signal(signal.rewards, advantages, self._credit, options)
            signal.trained = signal.informative or self.config.zero_variance == "keep"

    def _weigh(self, mini: MiniBatch) -> None:
        """What each token's loss is multiplied with: its weight in the reduction; and the correction if known by now.

        What a correction masks leaves the reduction's denominators too, so it has to be known for the whole update.
        """
        units, device = mini.batch.tokens, self.policy.device
        weight = np.zeros(len(mini))
        kept = np.ones(len(mini), dtype=bool)
        if self._correction is not None and mini.old_logprob is not None:
            before = mini.tokens(mini.old_logprob, mini.old_logprob)
            found = take_weights(self._correction, before, self.config.correction.options)
            mini.correction, mini.measured = found.values.detach(), dict(found.metrics)
            if found.keep is not None:
                kept = found.keep.cpu().numpy()
        weight[kept] = self.config.reduction.weights(
            step=units.step[kept], trajectory=units.trajectory[kept], group=units.group[kept]
        )
        mini.weight = torch.from_numpy(weight).to(device)
        if not kept.any():
            mini.micro_batches = []

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def _objective(
        self, mini: MiniBatch, logprob: torch.Tensor, chosen: torch.Tensor | slice
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Each chosen token's part of the loss, weighted, [K] with gradient; and metrics [K]."""
        assert mini.weight is not None
        current = logprob.detach()
        old = current if mini.old_logprob is None else mini.old_logprob[chosen]
        tokens = mini.tokens(logprob, old, chosen)
        loss = take_loss(self._loss, tokens, self.config.loss.options)
        values: torch.Tensor = loss.values
        measured = dict(loss.metrics)
        if mini.correction is not None:
            values = values * mini.correction[chosen]
        elif self._correction is not None:
            correction = take_weights(self._correction, tokens, self.config.correction.options)
            if correction.keep is not None:  # too late: the weights of the whole update are taken
                raise UserError(
                    f"correction {self.config.correction.kind!r} leaves out tokens now and did not say so when it was "
                    "tried with none: it must return `keep` always or never"
                )
            values = values * correction.values.detach()
            measured |= correction.metrics
        measured |= {name: value[chosen] for name, value in mini.measured.items()}
        if self._kl is not None and mini.reference_logprob is not None:
            kl = self._kl(logprob, mini.reference_logprob[chosen])
            measured["kl"] = kl.detach()
            if self.config.kl.applies_to == "loss":
                values = values + self.config.kl.coef * kl
        return values * mini.weight[chosen].to(current.dtype), measured

    def _slopes(self, mini: MiniBatch, metrics: TokenMetrics) -> torch.Tensor:
        """The derivative of the loss by each token's log-probability, [M], for a loss that couples tokens.

        The first of two passes: log-probabilities of all micro-batches without gradient, the loss over all of them,
        its derivative. The second pass back-propagates sum(derivative * log-probability), which has the same gradient.
        """
        assert mini.old_logprob is not None  # `old_logprobs_needed`
        current = self.policy.logprobs(mini.micro_batches, len(mini)) if self._moved else mini.old_logprob
        logprob = current.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            values, measured = self._objective(mini, logprob, slice(None))
            values.sum().backward()  # type: ignore[no-untyped-call]
        # Every rank has the whole mini-batch here, and measures what it computes itself.
        own = torch.cat([micro_batch.token for micro_batch in mini.micro_batches]).to(self.policy.device)
        metrics.add_loss(values.detach()[own].sum())
        metrics.add({name: value[own] for name, value in measured.items()})
        metrics.add_gap(mini.old_logprob[own], mini.sampler_logprob[own])
        assert logprob.grad is not None
        return logprob.grad
