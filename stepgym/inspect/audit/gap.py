"""Sampled against recomputed logprobs: the proof that what was recorded is what the model would have sampled.

Only steps that the policy sampled from softmax(logits / T), T > 0, untruncated, with the very weights at hand can be
compared; the others are counted with the reason. Steps that extend one another are scored as one sequence.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepgym.inspect.audit.checks.model import LOGPROB_GAP
from stepgym.inspect.audit.context import tokens_in_context
from stepgym.inspect.audit.finding import Finding
from stepgym.inspect.audit.models import ModelOfVersion
from stepgym.inspect.audit.rendering import Renderings
from stepgym.record.merge import find_chains
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory

if TYPE_CHECKING:
    from stepgym.model.scorer import ScoredRow, Scorer

_EDGES = np.concatenate([[0.0], np.logspace(-9, 4, 2601), [np.inf]])
"""Bins of gaps: 200 to a factor of ten, so a percentile is known to about one percent of itself."""


@dataclass(frozen=True, slots=True)
class GapOptions:
    """How logprobs are recomputed.

    Attributes:
        model: A folder or hub name; `auto` takes the run's own checkpoint of each weights version.
        weights_version: Version of the weights in that folder; None finds it out.
        device: A torch device; `auto` is `cuda` where there is one.
        dtype: Type of the weights: `float32`, `bfloat16`, `float64`.
        max_gap: A step whose mean absolute gap, in nats, is above this is a finding.
        batch_tokens: Most tokens of one forward pass.
    """

    model: str
    weights_version: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    max_gap: float = 0.05
    batch_tokens: int = 16384


@dataclass(frozen=True, slots=True)
class VersionGap:
    """The gap of the tokens that one weights version sampled, in nats.

    Attributes:
        version: Version of the weights; empty where none is recorded.
        model: The model that it was compared with.
        steps, tokens: How many were compared.
        mean, p99, max: Mean, 99th percentile and maximum of |sampled - recomputed|.
        bias: Mean of sampled - recomputed.
    """

    version: str
    model: str
    steps: int
    tokens: int
    mean: float
    p99: float
    max: float
    bias: float


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with one of the largest gaps: where it is, both logprobs, and the tokens around it."""

    trajectory: str
    step: int
    token: int
    sampled: float
    recomputed: float
    context: str


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Sampled against recomputed logprobs of a run.

    Attributes:
        steps, tokens: How many were compared.
        mean, p99, max, bias: Of all of them; see `VersionGap`. None where nothing could be compared.
        versions: The same for each weights version.
        not_compared: Steps that could not be compared, by reason.
        worst: The tokens with the largest gaps, largest first.
    """

    steps: int
    tokens: int
    mean: float | None
    p99: float | None
    max: float | None
    bias: float | None
    versions: Sequence[VersionGap] = ()
    not_compared: Mapping[str, int] = field(default_factory=dict)
    worst: Sequence[WorstToken] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            **{name: getattr(self, name) for name in ("steps", "tokens", "mean", "p99", "max", "bias")},
            "versions": [asdict(version) for version in self.versions],
            "not_compared": dict(self.not_compared),
            "worst": [asdict(token) for token in self.worst],
        }


def measure_gap(
    read: Callable[[], Iterable[Trajectory]],
    models: Sequence[ModelOfVersion],
    options: GapOptions,
    renderings: Renderings,
    limit: int,
    report: Callable[[Finding], None],
) -> LogprobGap:
    """Recompute logprobs with each model, one at a time, and compare them with those that were recorded.

    Args:
        read: Gives the run's trajectories; called once for each model, so that memory stays flat.
        models: Which model has which weights.
        options: How they are recomputed.
        renderings: For the text around tokens.
        limit: Most worst tokens that are kept.
        report: Called with a finding for each step over `options.max_gap`.

    Raises `UserError` for a model that cannot be loaded.
    """
    from stepgym.model.scorer import Scorer

    total, versions, worst = _Gaps(), [], _Worst(limit)
    reasons: Counter[str] = Counter()
    for model in models:
        scorer = Scorer.load(
            model.path,
            device=options.device,
            dtype=options.dtype,
            batch_tokens=options.batch_tokens,
        )
        gaps = _Gaps()
        for scored in _scored_steps(read(), model.version, scorer, reasons if model is models[0] else Counter()):
            gaps.add(scored.gap)
            finding = worst.look_at(scored, renderings, options.max_gap)
            if finding is not None:
                report(finding)
        total.merge(gaps)
        versions.append(gaps.figures(model))
    compared = sum(version.steps for version in versions)
    if len(models) > 1:
        reasons["weights of another version"] -= sum(version.steps for version in versions[1:])
    known = {reason: count for reason, count in reasons.items() if count > 0}
    shown = total.figures(ModelOfVersion("", ""))
    some = shown.tokens > 0
    return LogprobGap(
        steps=compared,
        tokens=shown.tokens,
        mean=shown.mean if some else None,
        p99=shown.p99 if some else None,
        max=shown.max if some else None,
        bias=shown.bias if some else None,
        versions=tuple(versions),
        not_compared=known,
        worst=tuple(worst.tokens()),
    )


class _ScoredStep(NamedTuple):
    """A step's compared tokens: places in prompt + response, sampled and recomputed logprobs."""

    trajectory: Trajectory
    number: int
    place: NDArray[np.int64]
    sampled: NDArray[np.float64]
    recomputed: NDArray[np.float64]

    @property
    def gap(self) -> NDArray[np.float64]:
        return self.sampled - self.recomputed


class _Gaps:
    """Adds up gaps without keeping them."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.total = self.signed = self.largest = 0.0
        self.bins = np.zeros(len(_EDGES) - 1, dtype=np.int64)

    def add(self, gap: NDArray[np.float64]) -> None:
        size = np.abs(gap)
        self.steps += 1
        self.tokens += len(gap)
        self.total += float(size.sum())
        self.signed += float(gap.sum())
        self.largest = max(self.largest, float(size.max()))
        self.bins += np.histogram(size, _EDGES)[0]

    def merge(self, other: _Gaps) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.total += other.total
        self.signed += other.signed
        self.largest = max(self.largest, other.largest)
        self.bins += other.bins

    def figures(self, model: ModelOfVersion) -> VersionGap:
        count = max(1, self.tokens)
        at = int(np.searchsorted(np.cumsum(self.bins), 0.99 * self.tokens))
        return VersionGap(
            version=model.version or "",
            model=model.path,
            steps=self.steps,
            tokens=self.tokens,
            mean=self.total / count,
            p99=min(self.largest, float(_EDGES[min(at, len(self.bins) - 1) + 1])) if self.tokens else 0.0,
            max=self.largest,
            bias=self.signed / count,
        )


class _Worst:
    """The tokens with the largest gaps, and the steps whose mean gap is too large."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._heap: list[tuple[float, int, WorstToken]] = []
        self._count = 0

    def look_at(self, scored: _ScoredStep, renderings: Renderings, max_gap: float) -> Finding | None:
        """Keep the step's worst token if it is among the worst of all; a finding if the step is over the limit."""
        size = np.abs(scored.gap)
        at, mean = int(size.argmax()), float(size.mean())
        kept = self.limit > 0 and (len(self._heap) < self.limit or size[at] > self._heap[0][0])
        if not kept and mean <= max_gap:
            return None
        step = scored.trajectory.steps[scored.number]
        rendering = renderings.first
        token = WorstToken(
            trajectory=str(scored.trajectory.id),
            step=scored.number,
            token=int(scored.place[at]),
            sampled=float(scored.sampled[at]),
            recomputed=float(scored.recomputed[at]),
            context=tokens_in_context(step, int(scored.place[at]), rendering.decode if rendering else None),
        )
        if kept:
            self._count += 1
            heapq.heappush(self._heap, (float(size[at]), self._count, token))
            if len(self._heap) > self.limit:
                heapq.heappop(self._heap)
        if mean <= max_gap:
            return None
        text = (
            f"sampled and recomputed logprobs differ by {mean:.3g} on average over {len(size)} tokens, "
            f"here {token.sampled:.4g} against {token.recomputed:.4g}"
        )
        return Finding(LOGPROB_GAP, "error", token.trajectory, token.step, token.token, text, token.context)

    def tokens(self) -> list[WorstToken]:
        """The worst tokens, largest gap first."""
        return [token for _, _, token in sorted(self._heap, key=lambda entry: -entry[0])]


def _scored_steps(
    trajectories: Iterable[Trajectory], version: str | None, scorer: Scorer, reasons: Counter[str]
) -> Iterator[_ScoredStep]:
    """Score what can be compared, in batches of about the scorer's size."""
    waiting: list[tuple[ScoredRow, list[_ScoredStep]]] = []
    tokens = 0
    for trajectory in trajectories:
        for row, steps in _rows(trajectory, version, scorer.vocabulary, reasons):
            waiting.append((row, steps))
            tokens += len(row.ids)
        if tokens >= 4 * scorer.batch_tokens:
            yield from _score(waiting, scorer)
            waiting, tokens = [], 0
    yield from _score(waiting, scorer)


def _score(waiting: Sequence[tuple[ScoredRow, list[_ScoredStep]]], scorer: Scorer) -> Iterator[_ScoredStep]:
    if not waiting:
        return
    for (_, steps), logprobs in zip(waiting, scorer.logprobs([row for row, _ in waiting]), strict=True):
        start = 0
        for step in steps:
            end = start + len(step.place)
            yield step._replace(recomputed=logprobs[start:end])
            start = end


def _rows(
    trajectory: Trajectory, version: str | None, vocabulary: int, reasons: Counter[str]
) -> Iterator[tuple[ScoredRow, list[_ScoredStep]]]:
    """The merged sequences of a trajectory with the places of what can be compared."""
    from stepgym.model.scorer import ScoredRow

    steps = trajectory.steps
    places: dict[int, NDArray[np.int64]] = {}
    for index, step in enumerate(steps):
        reason, place = _comparable(step, version, vocabulary)
        if reason:
            reasons[reason] += 1
        else:
            places[index] = place
    if not places:
        return
    chains, _ = find_chains(steps)
    for chain in chains:
        members = [index for index in chain if index in places]
        if not members:
            continue
        found = []
        for index in members:
            step, place = steps[index], places[index]
            assert step.prompt_ids is not None
            assert step.logprobs is not None
            sampled = step.logprobs[place - len(step.prompt_ids)].astype(np.float64)
            found.append(_ScoredStep(trajectory, index, place, sampled, np.zeros(0)))
        temperatures = np.concatenate([np.full(len(places[i]), _heat(steps[i].sampling), np.float32) for i in members])
        last = steps[members[-1]].full_ids
        yield ScoredRow(last, np.concatenate([places[i] for i in members]), temperatures), found


def _comparable(step: Step, version: str | None, vocabulary: int) -> tuple[str, NDArray[np.int64]]:
    """Why a step cannot be compared, or "" and the places of the tokens that can."""
    nothing = np.zeros(0, dtype=np.int64)
    sampling = step.sampling
    if step.prompt_ids is None or step.response_ids is None:
        return "no token ids", nothing
    if step.sampler != "policy":
        return "scripted", nothing
    if step.logprobs is None or not len(step.logprobs):
        return "no logprobs", nothing
    if sampling is None or sampling.logprobs_kind != "processed":
        return "logprobs of another kind", nothing
    if sampling.temperature <= 0:
        return "temperature 0", nothing
    if sampling != Sampling(temperature=sampling.temperature):
        return "truncated sampling or penalties", nothing
    chosen = np.isfinite(step.logprobs)
    if version is not None and step.weights_versions:
        mine = np.zeros(len(chosen), dtype=bool)
        for name, start, end in step.weights_versions:
            if str(name) == version:
                mine[start:end] = True
        chosen &= mine
        if not mine.any():
            return "weights of another version", nothing
    if int(step.full_ids.max(initial=0)) >= vocabulary:
        return "ids that the model does not know", nothing
    place = len(step.prompt_ids) + np.flatnonzero(chosen)
    place = place[place > 0]
    return ("", place) if len(place) else ("no finite logprobs", nothing)


def _heat(sampling: Sampling | None) -> float:
    return sampling.temperature if sampling is not None else 1.0
