"""From steps to what the model computes: trained tokens, the rows that hold them, and micro-batches of rows.

The loss lives on *trained tokens* (occurrences: a token of a step's response whose loss mask is 1). The forward pass
lives on *rows*: merged sequences, or single steps. Each trained token has one place in one row, and that is all that
joins the two; so the way rows are made, padded and cut never changes the objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.model.lengths import cut_by_length
from stepgym.record.merge import find_chains
from stepgym.record.step import Ids, Step
from stepgym.record.trajectory import Trajectory

RowKind: TypeAlias = Literal["merged", "steps"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """Where each trained token comes from. int64 arrays [M], by trajectory, then step, then token.

    Attributes:
        step: Number of the step within the batch, counted over all its steps.
        trajectory: Number of the trajectory within the batch.
        group: Number of the group within the batch.
        temperature: float32 [M] that the token was sampled at.
        sampler_logprob: float32 [M] of the sampler; NaN where absent or not comparable with the trainer's.
    """

    step: NDArray[np.int64]
    trajectory: NDArray[np.int64]
    group: NDArray[np.int64]
    temperature: NDArray[np.float32]
    sampler_logprob: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence that the model reads.

    Attributes:
        ids: int32 [L].
        token: int64 [K], number of each trained token of the row in the batch's `TrainedTokens`.
        position: int64 [K], where each stands in `ids`; at least 1, since the token before predicts it.
    """

    ids: Ids
    token: NDArray[np.int64]
    position: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Trained tokens and the rows that hold them.

    Attributes:
        tokens: The trained tokens.
        rows: The rows that hold at least one.
        steps: Number of steps, those without a trained token included.
        step_tokens: Tokens that training one step at a time would compute.
        mismatches: Why steps did not merge: reason to number.
    """

    tokens: TrainedTokens
    rows: Sequence[Row]
    steps: int
    step_tokens: int
    mismatches: Counter[str] = field(default_factory=Counter)

    @property
    def row_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(len(row.ids) for row in self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of about the same length, padded on the right, for one forward pass.

    Attributes:
        ids: int64 tensor [B, L]. What stands after a row's end is never read by what stands before it: attention is
            causal, so no mask is needed.
        place: int64 tensor [K], flat index into [B * L] of the position that predicts each trained token.
        target: int64 tensor [K], the trained tokens.
        token: int64 tensor [K], their numbers in the batch's `TrainedTokens`.
        temperature: float32 tensor [K], or None where all are 1.
    """

    ids: torch.Tensor
    place: torch.Tensor
    target: torch.Tensor
    token: torch.Tensor
    temperature: torch.Tensor | None


def make_batch(groups: Iterable[Sequence[Trajectory]], *, rows: RowKind = "merged") -> Batch:
    """Number the trained tokens of some groups of trajectories and lay them out in rows.

    Args:
        groups: The trajectories of each group, in the order in which units are numbered.
        rows: `merged` joins the steps of a trajectory that extend one another; `steps` makes one row of each step.

    Raises:
        UserError: A step has no token ids, or a trained token that nothing stands before.
    """
    layout = _Layout(rows)
    for group, trajectories in enumerate(groups):
        for trajectory in trajectories:
            layout.add(trajectory, group)
    return layout.batch()


class _Layout:
    def __init__(self, kind: RowKind) -> None:
        self.kind = kind
        self.rows: list[Row] = []
        self.counts: list[int] = []  # trained tokens of each step
        self.units: list[tuple[int, int]] = []  # (trajectory, group) of each step
        self.temperatures: list[float] = []
        self.sampler: list[NDArray[np.float32]] = []
        self.trajectories = 0
        self.total = 0
        self.step_tokens = 0
        self.mismatches: Counter[str] = Counter()

    def add(self, trajectory: Trajectory, group: int) -> None:
        steps = trajectory.steps
        starts, places = [], []
        for index, step in enumerate(steps):
            place = trained_positions(step, f"trajectory {trajectory.id}, step {index}")
            starts.append(self.total)
            places.append(place)
            self.total += len(place)
            self.counts.append(len(place))
            self.units.append((self.trajectories, group))
            self.temperatures.append(step.sampling.temperature if step.sampling is not None else 1.0)
            self.sampler.append(comparable_logprobs(step)[_mask(step)])
            self.step_tokens += step.length
        self.trajectories += 1
        if self.kind == "merged":
            chains, mismatches = find_chains(steps)
            self.mismatches.update(mismatches)
        else:
            chains = [[index] for index in range(len(steps))]
        for chain in chains:
            position = np.concatenate([places[index] for index in chain])
            if len(position):
                token = np.concatenate([np.arange(starts[i], starts[i] + len(places[i])) for i in chain])
                self.rows.append(Row(steps[chain[-1]].full_ids, token, position))

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
        return Batch(tokens, self.rows, len(counts), self.step_tokens, self.mismatches)


def _mask(step: Step) -> NDArray[np.bool_]:
    assert step.loss_mask is not None  # checked by trained_positions
    mask = step.loss_mask.astype(bool)
    if step.logprobs is not None:
        # A token of probability zero was not sampled, whatever put it there: there is nothing to learn from it.
        mask &= step.logprobs != -np.inf
    return mask


def trained_positions(step: Step, where: str) -> NDArray[np.int64]:
    """int64 [K], where the trained tokens of a step stand in its prompt + response.

    Raises `UserError`, beginning with `where`, for a step without ids and for a trained token at position 0.
    """
    if step.prompt_ids is None or step.response_ids is None:
        raise UserError(f"{where}: it has no token ids (its engine speaks only chat), so it cannot be trained on")
    positions = len(step.prompt_ids) + np.flatnonzero(_mask(step))
    if len(positions) and positions[0] == 0:
        raise UserError(f"{where}: the prompt is empty, so nothing predicts the first token of the response")
    return positions


def comparable_logprobs(step: Step) -> NDArray[np.float32]:
    """float32 [R], the sampler's logprobs where they mean what the trainer's mean; NaN elsewhere."""
    assert step.response_ids is not None
    sampling = step.sampling
    if (
        step.logprobs is None
        or step.sampler != "policy"
        or sampling is None
        or sampling.logprobs_kind != "processed"
        or sampling.temperature <= 0
    ):
        return np.full(len(step.response_ids), np.nan, dtype=np.float32)
    return step.logprobs


def micro_batches(batch: Batch, budget: int, *, pad_id: int = 0) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches of at most `budget` tokens, padding included.

    Rows are sorted by length and cut where padding and the number of micro-batches together cost least. A row longer
    than the budget goes alone. Padding by length beats packing rows end to end here: torch's causal attention skips
    nothing in a packed row, so on a CPU packing is half as fast, or worse.
    """
    lengths = np.array([len(row.ids) for row in batch.rows], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for start, end in cut_by_length(lengths[order], budget):
        yield pad_rows([batch.rows[index] for index in order[start:end]], batch.tokens.temperature, pad_id)


def pad_rows(rows: Sequence[Row], temperature: NDArray[np.float32], pad_id: int = 0) -> MicroBatch:
    """Put rows side by side, padded on the right.

    Args:
        rows: At least one row.
        temperature: float32 [M], of all trained tokens of the batch.
        pad_id: What the space after a row's end is filled with.
    """
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
    place = np.concatenate([index * width + row.position for index, row in enumerate(rows)])
    token = np.concatenate([row.token for row in rows])
    temperatures = temperature[token]
    return MicroBatch(
        ids=torch.from_numpy(ids),
        place=torch.from_numpy(place - 1),
        target=torch.from_numpy(ids.reshape(-1)[place]),
        token=torch.from_numpy(token),
        temperature=None if (temperatures == 1).all() else torch.from_numpy(temperatures),
    )
