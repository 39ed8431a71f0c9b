"""Supervised fine-tuning on recorded episodes: the warm start before reinforcement learning."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from stepgym.errors import UserError
from stepgym.record.trajectory import Trajectory
from stepgym.seeds import derive_seed
from stepgym.train.losses.cross_entropy import cross_entropy
from stepgym.train.losses.reduction import ReductionConfig
from stepgym.train.metrics import TokenMetrics
from stepgym.train.optimizer import Optimizer, OptimizerConfig
from stepgym.train.packs.batch import Batch, Path, make_batch
from stepgym.train.packs.occurrences import TrainedTokens
from stepgym.train.policy import Policy

logger = logging.getLogger(__name__)


class SFTConfig(BaseModel):
    """How a policy learns from recorded episodes.

    Attributes:
        updates: Optimizer steps.
        batch_size: Trajectories per update.
        reduction: What the loss is a mean over: `token`, `step`, `trajectory`, `group`, `{kind: constant, tokens: N}`.
        optimizer: AdamW, clipping and the schedule, whose decay ends with the last update.
        seed: Decides the order of the trajectories.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    updates: int = Field(default=400, gt=0)
    batch_size: int = Field(default=32, gt=0)
    reduction: ReductionConfig = ReductionConfig(kind="token")
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
        tokens: Tokens computed in all, by this process.
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
`learning_rate`, `tokens_trained`, `tokens_forward`, `tokens_per_second`."""


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
    data = _Data(chosen)
    if not len(data.trajectories):
        raise UserError(f"sft: none of the {len(chosen)} trajectories has a generated token to learn from")
    optimizer = Optimizer(policy.model.parameters(), config.optimizer, config.updates)
    history: list[dict[str, float]] = []
    tokens = 0
    with policy.training():
        for number, indices in enumerate(data.batches(config), start=1):
            begun = time.perf_counter()
            batch, weight = data.gather(indices, config.reduction)
            weights = torch.from_numpy(weight).to(policy.device)
            micro_batches = policy.micro_batches(batch)
            metrics = TokenMetrics()
            for micro_batch in micro_batches:
                scores = policy.score(micro_batch, greedy=True)
                own = weights[micro_batch.token.to(policy.device)].to(scores.logprob.dtype)
                loss = (cross_entropy(scores.logprob) * own).sum()
                (loss * policy.processes.size).backward()  # type: ignore[no-untyped-call]
                assert scores.greedy is not None  # asked for above
                metrics.add_loss(loss.detach())
                metrics.add({"accuracy": scores.greedy})
                metrics.count(len(micro_batch.token))
            metrics.close()
            rate = optimizer.learning_rate
            norm = optimizer.step()
            if not math.isfinite(norm):
                logger.warning("sft: update %d skipped: the gradient's norm is %s", number, norm)
            read = sum(micro_batch.tokens for micro_batch in micro_batches)
            tokens += read
            history.append(
                metrics.means(policy.processes)
                | {
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "tokens_trained": len(batch.tokens),
                    "tokens_forward": read,
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
    """All trajectories laid out once; an update only picks paths."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        numbers: dict[tuple[str, int, str], int] = {}
        for trajectory in trajectories:
            numbers.setdefault(trajectory.id.group, len(numbers))
        by_group: list[list[Trajectory]] = [[] for _ in numbers]
        for trajectory in trajectories:
            by_group[numbers[trajectory.id.group]].append(trajectory)
        made = make_batch(by_group)
        # At temperature 1, whatever they were sampled at.
        ones = np.ones(len(made.tokens), dtype=np.float32)
        self._all = replace(made, tokens=replace(made.tokens, temperature=ones))
        self._paths: dict[int, list[Path]] = {}
        for path in made.paths:
            self._paths.setdefault(int(made.tokens.trajectory[path.token]), []).append(path)
        self.trajectories = np.array(sorted(self._paths), dtype=np.int64)

    def batches(self, config: SFTConfig) -> Iterator[list[int]]:
        """Numbers of the trajectories of each update."""
        order: list[int] = []
        for epoch in range(-(-config.updates * config.batch_size // len(self.trajectories))):
            generator = np.random.default_rng(derive_seed(config.seed, "sft", epoch))
            order += generator.permutation(self.trajectories).tolist()
        for update in range(config.updates):
            yield order[update * config.batch_size : (update + 1) * config.batch_size]

    def gather(self, indices: Sequence[int], reduction: ReductionConfig) -> tuple[Batch, NDArray[np.float64]]:
        """The paths of an update, its tokens numbered anew, and the weight of each of them."""
        paths: list[Path] = []
        old: list[NDArray[np.int64]] = []
        count = 0
        for path in (path for index in indices for path in self._paths[index]):
            paths.append(replace(path, token=count))
            old.append(np.arange(path.token, path.token + len(path.position)))
            count += len(path.position)
        chosen = np.concatenate(old)
        units = self._all.tokens
        tokens = TrainedTokens(**{part.name: getattr(units, part.name)[chosen] for part in fields(TrainedTokens)})
        weight = reduction.weights(step=tokens.step, trajectory=tokens.trajectory, group=tokens.group)
        return replace(self._all, tokens=tokens, paths=paths), weight
