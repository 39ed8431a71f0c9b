"""Steps that extend each other, joined into the sequences a trainer would rather see.

A conversation of eight turns is eight steps, each of which repeats the ones before it. Where a step's prompt begins
with exactly the prompt + response of an earlier step, both are one path of the `TokenTree`, and one *merged sequence*
holds them. Where it does not (a template rewrote history, thinking was stripped), a new sequence starts and the
report says why. Nothing that was sampled is lost or appears twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.record.delta import PrefixIndex
from stepgym.record.step import Ids, Step, WeightsSpan

LOGPROBS_MISSING = "logprobs_missing"
PREFIX_MISMATCH = "prefix_mismatch"
BRANCHED = "branched"

_EXTENDING = ("extended", "continued")
_REASONLESS = ("", "first", *_EXTENDING)


@dataclass(frozen=True, slots=True, eq=False)
class MergedSequence:
    """A chain of steps, each extending the one before, as one prompt and one response.

    `prompt_ids` is the prompt of the first step; everything after it is the response, so that prompt + response is
    the last step's prompt + response. With N response tokens:

    Attributes:
        prompt_ids: int32 [P].
        response_ids: int32 [N], the sampled tokens and, between them, what came from the environment.
        loss_mask: int8 [N], each step's own mask on its own response; 0 between.
        logprobs: float32 [N], each step's own; 0.0 between. None where the steps have none.
        rewards: float32 [N], each step's reward on its last response token; 0 between. The reward of a step with an
            empty response is added to the last sampled token before it, or else to the first after it; a sequence
            without a single sampled token shows its reward only in `step_rewards`.
        step_index: int32 [N], index into the steps given to `merge_steps`; -1 between.
        steps: The indices of the steps that were merged, in order.
        step_rewards: float64 [len(steps)], the reward of each step.
        metrics: The metrics of each step.
        weights_versions: Spans (version, start, end) over the response of this sequence.
        routed_experts: int16 [P + N, layers, k], or None. Where several steps saw a token, its row is that of the
            first that has one, which for a sampled token is the step that sampled it; -1 where none has.
    """

    prompt_ids: Ids
    response_ids: Ids
    loss_mask: NDArray[np.int8]
    logprobs: NDArray[np.float32] | None
    rewards: NDArray[np.float32]
    step_index: NDArray[np.int32]
    steps: tuple[int, ...]
    step_rewards: NDArray[np.float64]
    metrics: tuple[Mapping[str, float], ...]
    weights_versions: tuple[WeightsSpan, ...]
    routed_experts: NDArray[np.int16] | None

    @property
    def reward(self) -> float:
        """Sum of the rewards of the merged steps."""
        return float(self.step_rewards.sum())

    @property
    def length(self) -> int:
        """Number of tokens, prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def full_ids(self) -> Ids:
        """int32 [P + N]: prompt and response, in order."""
        return np.concatenate([self.prompt_ids, self.response_ids])


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What merging did. Reports add up: `a + b` is the report of both.

    Attributes:
        steps: Number of steps that went in.
        sequences: Number of merged sequences that came out.
        tokens_before: Tokens of all steps, each with its whole prompt.
        tokens_after: Tokens of all sequences.
        mismatches: Why a sequence had to start although its conversation had begun before, by reason: what the
            renderer said (`template_rewrote_history`, `thinking_stripped`, `agent_rewrote_history`,
            `truncated_turn`, `turn_reopened`, `turn_closed`), `logprobs_missing` (one step has logprobs and the other
            has None), `branched` (the step agrees with what came before it, which another step has already
            continued), or else `prefix_mismatch`. The start of another conversation (a sub-agent, whose first prompt
            is rendered as `first` or shares no token with an earlier step) is no mismatch.
    """

    steps: int = 0
    sequences: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    mismatches: Mapping[str, int] = field(default_factory=dict)

    @property
    def merge_ratio(self) -> float:
        """Tokens before per token after; 1.0 where there are none."""
        return self.tokens_before / self.tokens_after if self.tokens_after else 1.0

    @property
    def conversations(self) -> int:
        """Number of sequences that start a conversation; all the others start at a mismatch."""
        return self.sequences - sum(self.mismatches.values())

    def __add__(self, other: MergeReport) -> MergeReport:
        return MergeReport(
            steps=self.steps + other.steps,
            sequences=self.sequences + other.sequences,
            tokens_before=self.tokens_before + other.tokens_before,
            tokens_after=self.tokens_after + other.tokens_after,
            mismatches=dict(Counter(self.mismatches) + Counter(other.mismatches)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "steps": self.steps,
            "sequences": self.sequences,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "merge_ratio": self.merge_ratio,
            "mismatches": dict(self.mismatches),
        }


def merge_steps(steps: Sequence[Step]) -> tuple[list[MergedSequence], MergeReport]:
    """Merge the steps of one trajectory, in the order they were sampled.

    A step joins the sequence whose last step it extends token for token (the longest such, the latest of equals), so
    that interleaved conversations merge each with its own. Logprobs of None and a list of logprobs do not merge; an
    empty response merges like any other. Sequences come in the order of their first steps.

    Raises:
        UserError: for steps without token ids (from an engine that speaks only chat), or with routed experts of
            different shapes in one conversation.
    """
    for i, step in enumerate(steps):
        if step.prompt_ids is None:
            raise UserError(
                f"merge_steps: step {i} has no token ids (its engine speaks only chat); it cannot be merged"
            )
    chains, mismatches = find_chains(steps)
    sequences = [_merge_chain(steps, chain) for chain in chains]
    report = MergeReport(
        steps=len(steps),
        sequences=len(sequences),
        tokens_before=sum(step.length for step in steps),
        tokens_after=sum(steps[chain[-1]].length for chain in chains),
        mismatches=dict(mismatches),
    )
    return sequences, report


def find_chains(steps: Sequence[Step]) -> tuple[list[list[int]], Counter[str]]:
    """Indices of the steps of each merged sequence, and why a sequence started (see `MergeReport.mismatches`)."""
    chains: list[list[int]] = []
    mismatches: Counter[str] = Counter()
    lengths = np.array([step.length for step in steps], dtype=np.int64)
    has_logprobs = np.array([step.logprobs is not None for step in steps], dtype=bool)
    is_tail = np.zeros(len(steps), dtype=bool)
    chain_of: dict[int, list[int]] = {}
    index: PrefixIndex | None = None
    longest = -1
    for i, step in enumerate(steps):
        before = -1
        # Nearly every step extends the longest conversation there is; only where one does not is the index needed.
        if (
            longest >= 0
            and has_logprobs[longest] == has_logprobs[i]
            and _extends(steps[longest], _ids(step.prompt_ids))
        ):
            before = longest
        elif i:
            index = index or PrefixIndex(steps)
            shared = index.shared(i)
            extended = is_tail[:i] & (shared == lengths[:i])
            matching = np.flatnonzero(extended & (has_logprobs[:i] == has_logprobs[i]))
            if len(matching):
                before = int(max(matching, key=lambda tail: (lengths[tail], tail)))
            else:
                reason = _reason(step, shared, lost_logprobs=bool(extended.any()))
                mismatches.update([reason] if reason else [])
        if before < 0:
            chains.append([])
            chain_of[i] = chains[-1]
        else:
            is_tail[before] = False
            chain_of[i] = chain_of[before]
        chain_of[i].append(i)
        is_tail[i] = True
        if longest < 0 or lengths[i] >= lengths[longest]:
            longest = i
    return chains, mismatches


def _reason(step: Step, shared: NDArray[np.int64], *, lost_logprobs: bool) -> str:
    """Why a step starts a sequence, given the tokens its prompt shares with each step before it; "" for no mismatch."""
    if lost_logprobs:
        return LOGPROBS_MISSING
    if step.rendering not in _REASONLESS:
        return step.rendering
    if step.rendering == "first" or not shared.any():
        return ""
    if step.rendering in _EXTENDING or shared.max() == len(_ids(step.prompt_ids)):
        return BRANCHED
    return PREFIX_MISMATCH


def _ids(ids: Ids | None) -> Ids:
    assert ids is not None  # merge_steps refuses steps without ids
    return ids


def _extends(tail: Step, prompt: Ids) -> bool:
    """Whether `prompt` begins with the whole of the tail's prompt + response."""
    before, said = _ids(tail.prompt_ids), _ids(tail.response_ids)
    split = len(before)
    end = split + len(said)
    if end > len(prompt):
        return False
    # The response is compared first: where history was rewritten, it is what no longer matches, and it is short.
    return bool((prompt[split:end] == said).all()) and bool((prompt[:split] == before).all())


def _merge_chain(steps: Sequence[Step], chain: list[int]) -> MergedSequence:
    first, last = steps[chain[0]], steps[chain[-1]]
    prompt_ids = _ids(first.prompt_ids)
    start = len(prompt_ids)
    size = last.length - start
    response_ids = np.empty(size, dtype=np.int32)
    history = _ids(last.prompt_ids)[start:]
    response_ids[: len(history)] = history
    response_ids[len(history) :] = _ids(last.response_ids)
    loss_mask = np.zeros(size, dtype=np.int8)
    logprobs = None if first.logprobs is None else np.zeros(size, dtype=np.float32)
    step_index = np.full(size, -1, dtype=np.int32)
    rewards = np.zeros(size, dtype=np.float32)
    spans: list[WeightsSpan] = []
    last_token, unplaced = -1, 0.0
    for i in chain:
        step = steps[i]
        length = len(_ids(step.response_ids))
        begin = len(_ids(step.prompt_ids)) - start
        if length:
            end = begin + length
            loss_mask[begin:end] = 1 if step.loss_mask is None else step.loss_mask
            step_index[begin:end] = i
            if logprobs is not None:
                logprobs[begin:end] = step.logprobs
            if unplaced:
                rewards[begin] += unplaced
                unplaced = 0.0
            last_token = end - 1
        if step.reward:
            if last_token >= 0:
                rewards[last_token] += step.reward
            else:
                unplaced += step.reward
        for version, span_start, span_end in step.weights_versions:
            spans.append((version, begin + span_start, begin + span_end))
    return MergedSequence(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        rewards=rewards,
        step_index=step_index,
        steps=tuple(chain),
        step_rewards=np.array([steps[i].reward for i in chain], dtype=np.float64),
        metrics=tuple(steps[i].metrics for i in chain),
        weights_versions=tuple(spans),
        routed_experts=_merge_experts(steps, chain),
    )


def _merge_experts(steps: Sequence[Step], chain: list[int]) -> NDArray[np.int16] | None:
    """Routed experts of a whole sequence; see `MergedSequence.routed_experts`."""
    recorded = [(i, experts) for i in chain if (experts := steps[i].routed_experts) is not None]
    if not recorded:
        return None
    shapes = {experts.shape[1:] for _, experts in recorded}
    if len(shapes) > 1:
        raise UserError(f"merge_steps: routed experts of one conversation differ in shape: {sorted(shapes)}")
    merged = np.full((steps[chain[-1]].length, *shapes.pop()), -1, dtype=np.int16)
    missing = np.ones(len(merged), dtype=bool)
    for _, experts in recorded:
        # Rows are taken whole: experts of one forward pass, never a mixture of two.
        present = (experts >= 0).any(axis=tuple(range(1, experts.ndim)))
        fill = np.flatnonzero(missing[: len(experts)] & present)
        merged[fill] = experts[fill]
        missing[fill] = False
    return merged
