"""What a training run came to: its `summary.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgym.train.alarms import Alarm

_TOKENS = ("tokens_trained", "tokens_steps", "tokens_unique", "tokens_forward")


@dataclass(frozen=True)
class TrainingResult:
    """What a training run came to; `to_dict` is its `summary.json`.

    Attributes:
        success_before, success_after: Share of solved test episodes, sampled, before and after reinforcement.
        greedy_before, greedy_after: The same at temperature 0; None unless the recipe asks for it.
        held_out_tasks: Number of test tasks.
        updates: Optimizer steps of reinforcement up to `best_iteration`: those that made the reported weights.
        iterations: Batches of rollouts.
        outcomes: Training episodes by outcome, most frequent first.
        best_iteration: The iteration whose weights are reported and exported: the best on the validation split, or
            the last where there is none.
        seed: The run's seed.
        wall_s: Seconds since the run was first started; a resumed run counts its pauses too.
        seconds: Seconds by stage, in this process.
        model: Folder of the final model, as `transformers` loads it.
        totals: Sums over all iterations, and peaks of memory (see `run_totals`).
        alarms: The alarms that were raised, in their order.
    """

    success_before: float | None
    success_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    held_out_tasks: int
    updates: int
    iterations: int
    outcomes: Mapping[str, int]
    best_iteration: int
    seed: int
    wall_s: float
    seconds: Mapping[str, float]
    model: str
    totals: Mapping[str, float] = field(default_factory=dict)
    alarms: Sequence[Alarm] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**plain, "alarms": [alarm.to_dict() for alarm in self.alarms]}


def count_outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The training episodes of all iterations by outcome, most frequent first, from the rows of `metrics.jsonl`."""
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith("outcome/"):
                counts[name.removeprefix("outcome/")] += int(value)
    return dict(counts.most_common())


def run_totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What all iterations of a run took together, whichever process did them.

    Sums: `episodes`, `tokens_sampled`, `tokens_trained`, `tokens_steps` (each step counted whole), `tokens_unique`
    (each unique token of an update once), `tokens_forward` (computed), `seconds/PHASE`. Peaks: `memory_...`.

    Args:
        rows: Rows of `metrics.jsonl`.
    """
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name in _TOKENS or name == "episodes" or name.startswith("seconds/"):
                totals[name] = totals.get(name, 0) + value
            elif name.startswith("memory_"):
                totals[name] = max(totals.get(name, 0.0), value)
        if "episode_tokens_mean" in row:
            sampled = round(row["episode_tokens_mean"] * row["episodes"])
            totals["tokens_sampled"] = totals.get("tokens_sampled", 0) + sampled
    return totals
