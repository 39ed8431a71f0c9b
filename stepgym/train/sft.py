"""Supervised fine-tuning on recorded episodes: the warm start before reinforcement learning."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from stepgym.errors import UserError
from stepgym.model.lengths import cut_by_length
from stepgym.record.trajectory import Trajectory
from stepgym.seeds import derive_seed
from stepgym.train.batch import Batch, MicroBatch, Row, RowKind, make_batch, pad_rows
from stepgym.train.losses.cross_entropy import cross_entropy
from stepgym.train.losses.reduction import Reduction, token_weights
from stepgym.train.metrics import TokenMetrics
from stepgym.train.optimizer import Optimizer, OptimizerConfig
from stepgym.train.policy import Policy

logger = logging.getLogger(__name__)


class SFTConfig(BaseModel):
    """How a policy learns from recorded episodes.

    Attributes:
        updates: Optimizer steps.
        batch_size: Trajectories per update.
        reduction: What the loss is a mean over: `token`, `step`, `trajectory` or `group`.
        rows: `merged` joins steps that extend one another; `steps` computes each step alone. The result is the same.
        optimizer: AdamW, clipping and the schedule, whose decay ends with the last update.
        seed: Decides the order of the trajectories.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    updates: int = Field(default=400, gt=0)
    batch_size: int = Field(default=32, gt=0)
    reduction: Reduction = "token"
    rows: RowKind = "merged"
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.5e-3, warmup_updates=20, decay="cosine")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SFTReport:
    """What supervised fine-tuning came to.

    Attributes:
        updates: Updates made.
        loss: Mean cross-entropy in nats of the last tenth of the updates.
        accuracy: Share of trained tokens that were the most likely one, over the same updates.
        trajectories: Trajectories learned from.
        tokens: Tokens computed in all, without padding.
        seconds: Wall time.
    """

    updates: int
    loss: float
    accuracy: float
    trajectories: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, float]:
        """All of it as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


Progress = Callable[[int, Mapping[str, float]], None]
"""Called after each update with its number (from 1) and its metrics: `loss`, `accuracy`, `grad_norm`,
`learning_rate`, `tokens_trained`, `tokens_rows`, `tokens_forward`, `tokens_per_second`."""


def sft(
    policy: Policy,
    trajectories: Iterable[Trajectory],
    config: SFTConfig | None = None,
    *,
    progress: Progress | None = None,
) -> SFTReport:
    """Minimise the cross-entropy of every generated token (loss mask 1), at temperature 1, scripted or sampled.

    Each pass over the trajectories takes them in a new order drawn from the seed; a batch may reach over the end of a
    pass. Attempts that are not final, and trajectories without a generated token, are left out.

    Args:
        policy: The model that is trained, in place.
        trajectories: Recorded episodes. Which ones are worth learning from is the caller's choice.
        config: See `SFTConfig`.
        progress: Called after each update.

    Raises:
        UserError: There is nothing to learn from, or a step has no token ids.
    """
    config = config or SFTConfig()
    started = time.perf_counter()
    chosen = [trajectory for trajectory in trajectories if trajectory.final]
    data = _Data(chosen, config.rows)
    if not len(data.trajectories):
        raise UserError(f"sft: none of the {len(chosen)} trajectories has a generated token to learn from")
    optimizer = Optimizer(policy.model.parameters(), config.optimizer, config.updates)
    history: list[dict[str, float]] = []
    tokens = 0
    with policy.training():
        for number, indices in enumerate(data.batches(config), start=1):
            begun = time.perf_counter()
            micro_batches, weights = data.gather(indices, config.reduction, policy.config.micro_batch_tokens)
            metrics = TokenMetrics()
            for micro_batch, weight in zip(micro_batches, weights, strict=True):
                scores = policy.score(micro_batch, greedy=True)
                weight = weight.to(device=policy.device, dtype=scores.logprob.dtype)
                loss = (cross_entropy(scores.logprob) * weight).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                assert scores.greedy is not None  # asked for above
                metrics.add_loss(loss.detach())
                metrics.add({"accuracy": scores.greedy})
                metrics.count(len(micro_batch.token))
            metrics.close()
            rate = optimizer.learning_rate
            norm = optimizer.step()
            if not math.isfinite(norm):
                logger.warning("sft: update %d skipped: the gradient's norm is %s", number, norm)
            read = sum(len(row.ids) for index in indices for row in data.rows[index])
            tokens += read
            history.append(
                metrics.means()
                | {
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "tokens_trained": sum(len(micro_batch.token) for micro_batch in micro_batches),
                    "tokens_rows": read,
                    "tokens_forward": sum(micro_batch.ids.numel() for micro_batch in micro_batches),
                    "tokens_per_second": read / max(1e-9, time.perf_counter() - begun),
                }
            )
            if progress is not None:
                progress(number, history[-1])
    tail = history[-max(1, len(history) // 10) :]
    return SFTReport(
        updates=optimizer.updates,
        loss=float(np.mean([metrics["loss"] for metrics in tail])),
        accuracy=float(np.average([m["accuracy"] for m in tail], weights=[m["tokens_trained"] for m in tail])),
        trajectories=len(data.trajectories),
        tokens=tokens,
        seconds=time.perf_counter() - started,
    )


class _Data:
    """All trajectories laid out once; an update only picks rows and pads them."""

    def __init__(self, trajectories: Sequence[Trajectory], kind: RowKind) -> None:
        numbers: dict[tuple[str, int, str], int] = {}
        for trajectory in trajectories:
            numbers.setdefault(trajectory.id.group, len(numbers))
        by_group: list[list[Trajectory]] = [[] for _ in numbers]
        for trajectory in trajectories:
            by_group[numbers[trajectory.id.group]].append(trajectory)
        batch: Batch = make_batch(by_group, rows=kind)
        self.units = batch.tokens
        self.rows: dict[int, list[Row]] = {}
        for row in batch.rows:
            self.rows.setdefault(int(batch.tokens.trajectory[row.token[0]]), []).append(row)
        self.trajectories = np.array(sorted(self.rows), dtype=np.int64)
        self._ones = np.ones(len(batch.tokens), dtype=np.float32)  # temperature 1, whatever they were sampled at

    def batches(self, config: SFTConfig) -> Iterator[list[int]]:
        """Numbers of the trajectories of each update."""
        order: list[int] = []
        for epoch in range(-(-config.updates * config.batch_size // len(self.trajectories))):
            generator = np.random.default_rng(derive_seed(config.seed, "sft", epoch))
            order += generator.permutation(self.trajectories).tolist()
        for update in range(config.updates):
            yield order[update * config.batch_size : (update + 1) * config.batch_size]

    def gather(
        self, indices: Sequence[int], reduction: Reduction, budget: int
    ) -> tuple[list[MicroBatch], list[torch.Tensor]]:
        """The micro-batches of an update, and the weight of each trained token in them."""
        rows = sorted((row for index in indices for row in self.rows[index]), key=lambda row: -len(row.ids))
        lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
        token = np.concatenate([row.token for row in rows])
        units = self.units
        weight = token_weights(
            reduction, step=units.step[token], trajectory=units.trajectory[token], group=units.group[token]
        )
        micro_batches, weights, done = [], [], 0
        for start, end in cut_by_length(lengths, budget):
            micro_batch = pad_rows(rows[start:end], self._ones)
            micro_batches.append(micro_batch)
            weights.append(torch.from_numpy(weight[done : done + len(micro_batch.token)]))
            done += len(micro_batch.token)
        return micro_batches, weights
