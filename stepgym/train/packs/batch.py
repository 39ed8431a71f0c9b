"""The steps of some groups as paths: the tokens that the model has to read, and the trained tokens among them.

The loss lives on trained tokens, the forward pass on *micro-batches* (see `packs.forest` and `packs.rows`). One number
per trained token is all that joins the two, so the way micro-batches are laid out and cut never changes the objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepgym.record.merge import find_chains
from stepgym.record.step import Ids, Step
from stepgym.record.trajectory import Trajectory
from stepgym.train.packs.cutting import prefix_order
from stepgym.train.packs.occurrences import TrainedTokens, comparable_logprobs, trained_mask, trained_positions


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A step as the model reads it.

    Attributes:
        ids: int32 [L], its prompt and response up to the last trained token, which itself need not be read.
        position: int64 [K], where each trained token stands, from 1 to L; the token before it predicts it.
        target: int32 [K], the trained tokens.
        token: Number of the first of them in the batch's `TrainedTokens`; the others follow.
        chain: Number of the merged sequence that the step belongs to, within the batch.
    """

    ids: Ids
    position: NDArray[np.int64]
    target: Ids
    token: int
    chain: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Trained tokens and the paths that hold them.

    Attributes:
        tokens: The trained tokens.
        paths: The steps that have at least one.
        steps: Number of steps, those without a trained token included.
        sequences: Number of merged sequences that all of these make.
        step_tokens: Tokens that training one step at a time would compute: of the steps that are in `paths`, whole.
        mismatches: Why steps did not merge: reason to number.
    """

    tokens: TrainedTokens
    paths: Sequence[Path]
    steps: int
    sequences: int
    step_tokens: int
    mismatches: Counter[str] = field(default_factory=Counter)

    @property
    def unique_tokens(self) -> int:
        """Tokens that are left where every prefix that any two steps share is computed once."""
        order = prefix_order([path.ids for path in self.paths], [0] * len(self.paths))
        return int((order.length - order.shared).sum())


def make_batch(groups: Iterable[Sequence[Trajectory]]) -> Batch:
    """Number the trained tokens of some groups of trajectories.

    Args:
        groups: The trajectories of each group, in the order in which units are numbered.

    Raises:
        UserError: A step has no token ids, or a trained token that nothing stands before.
    """
    collected = _Collected()
    for group, trajectories in enumerate(groups):
        for trajectory in trajectories:
            collected.add(trajectory, group)
    return collected.batch()


class _Collected:
    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.counts: list[int] = []  # trained tokens of each step
        self.units: list[tuple[int, int]] = []  # (trajectory, group) of each step
        self.temperatures: list[float] = []
        self.sampler: list[NDArray[np.float32]] = []
        self.trajectories = 0
        self.chains = 0
        self.total = 0
        self.step_tokens = 0
        self.mismatches: Counter[str] = Counter()

    def add(self, trajectory: Trajectory, group: int) -> None:
        chains, mismatches = find_chains(trajectory.steps)
        self.mismatches.update(mismatches)
        chain_of = {index: number for number, chain in enumerate(chains) for index in chain}
        for index, step in enumerate(trajectory.steps):
            position = trained_positions(step, f"trajectory {trajectory.id}, step {index}")
            self.counts.append(len(position))
            self.units.append((self.trajectories, group))
            self.temperatures.append(step.sampling.temperature if step.sampling is not None else 1.0)
            self.sampler.append(comparable_logprobs(step)[trained_mask(step)])
            if len(position):
                self.step_tokens += step.length
                self.paths.append(_path(step, position, self.total, self.chains + chain_of[index]))
                self.total += len(position)
        self.chains += len(chains)
        self.trajectories += 1

    def batch(self) -> Batch:
        counts = np.array(self.counts, dtype=np.int64)
        units = np.array(self.units, dtype=np.int64).reshape(-1, 2)
        tokens = TrainedTokens(
            step=np.repeat(np.arange(len(counts)), counts),
            trajectory=np.repeat(units[:, 0], counts),
            group=np.repeat(units[:, 1], counts),
            temperature=np.repeat(np.array(self.temperatures, dtype=np.float32), counts),
            sampler_logprob=np.concatenate([np.zeros(0, dtype=np.float32), *self.sampler]),
        )
        return Batch(tokens, self.paths, len(counts), self.chains, self.step_tokens, self.mismatches)


def _path(step: Step, position: NDArray[np.int64], token: int, chain: int) -> Path:
    ids = step.full_ids
    return Path(ids[: position[-1]], position, ids[position], token, chain)
