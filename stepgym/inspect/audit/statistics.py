"""Figures about a run, added up trajectory by trajectory; the checks of the whole run look at them."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepgym.inspect.audit.context import tokens_in_context
from stepgym.inspect.audit.rendering import Rendering
from stepgym.inspect.audit.views import GroupView, Member, RunFacts, Said, StepView, TrajectoryView
from stepgym.inspect.main_line import PLAIN_LOOP
from stepgym.record.json_text import dump_json
from stepgym.record.merge import MergeReport, find_chains
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step

_KEPT = 1000
_DIGITS = re.compile(r"(\d+)")


class Place(NamedTuple):
    """A token or a row of tokens: where it begins, the tokens around it, and how many they are."""

    trajectory: str
    step: int
    token: int | None
    context: str
    size: int = 1


class FirstUse(NamedTuple):
    """What one weights version sampled in an iteration: how many tokens, and where the first of them is."""

    tokens: int
    trajectory: str
    step: int
    token: int


@dataclass(slots=True)
class EndsOfTurns:
    """How responses that the policy sampled end.

    Attributes:
        steps: Responses.
        trained, masked: Responses that end in a stop token, with a loss mask of 1 or 0 there. Without a tokenizer any
            last token may be one.
        open: Responses that end in none (stop string, length).
        free: Trained ends whose logprob is exactly 0, the first thousand.
        free_rows: Two and more other trained tokens in a row whose logprob is exactly 0, one of each response.
        others, free_others: Sampled tokens that are no such ends, and how many of them have a logprob of exactly 0.
    """

    steps: int = 0
    trained: int = 0
    masked: int = 0
    open: int = 0
    free: list[Place] = field(default_factory=list)
    free_rows: list[Place] = field(default_factory=list)
    others: int = 0
    free_others: int = 0


@dataclass(slots=True)
class LogprobRange:
    """Lowest and highest logprob of the tokens that were sampled at a temperature above 0, and how many they are."""

    tokens: int = 0
    low: float = np.inf
    high: float = -np.inf


class Statistics:
    """Figures about a run.

    Args:
        facts: What is known about the run besides its trajectories.
        rendering: The run's renderer; None without a tokenizer.

    Attributes:
        ends: How responses end.
        logprobs: Range of the sampled tokens' logprobs.
        outcomes: Final trajectories by outcome.
        copies: Trajectories with the sampler's seed of an earlier one, each with that one; the first thousand.
        in_flight: By (phase, iteration): those in which a response was sampled by several weights versions.
        versions: By (phase, iteration): what each weights version sampled.
        counted: By (phase, iteration): final trajectories, and those of them that could be scored.
        flat: By phase: groups whose members all have one reward, and groups with two members or more.
        templates: Trajectories by (template digest, date) that they recorded.
        rewarded_last, rewarded_early_count: By environment: episodes of several turns of which one is rewarded, the
            last one or an earlier one. `rewarded_early` are the places of the latter, the first thousand.
        strange_templates: Trajectories by template digest, where it is not the digest of the audit's own template.
    """

    def __init__(self, facts: RunFacts, rendering: Rendering | None) -> None:
        self.facts = facts
        self.template = rendering.digest if rendering is not None else ""
        self.trajectories = self.steps = self.prompt_tokens = self.response_tokens = self.trained_tokens = 0
        self.ends = EndsOfTurns()
        self.logprobs = LogprobRange()
        self.outcomes: Counter[str] = Counter()
        self.in_flight: set[tuple[str, int]] = set()
        self.copies: list[tuple[str, str]] = []
        self._seeds: dict[int, str] = {}
        self.versions: dict[tuple[str, int], dict[str, FirstUse]] = {}
        self.counted: dict[tuple[str, int], tuple[int, int]] = {}
        self.flat: dict[str, tuple[int, int]] = {}
        self.templates: Counter[tuple[str, str]] = Counter()
        self.strange_templates: Counter[str] = Counter()
        self.rewarded_last: Counter[str] = Counter()
        self.rewarded_early_count: Counter[str] = Counter()
        self.rewarded_early: dict[str, list[Place]] = {}
        self._phases: Counter[str] = Counter()
        self._repeated = 0
        self._groups = 0
        self._samplers: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._finishes: Counter[str] = Counter()
        self._renderings: Counter[str] = Counter()
        self._without_ids = 0
        self._merged = MergeReport()
        self._chains: Counter[int] = Counter()

    # ---- adding up --------------------------------------------------------------------------------------------------

    def add(self, view: TrajectoryView) -> Member:
        """Count a trajectory; what is kept of it is returned."""
        trajectory = view.trajectory
        key = trajectory.id
        self.trajectories += 1
        self._phases[key.phase] += 1
        if trajectory.final:
            self.outcomes[str(trajectory.outcome)] += 1
            stored, standing = self.counted.get((key.phase, key.iteration), (0, 0))
            stands = trajectory.outcome.scored and trajectory.reward is not None
            self.counted[key.phase, key.iteration] = (stored + 1, standing + stands)
        else:
            self._repeated += 1
        self._add_template(view)
        self._add_reward(view)
        for each in view.steps:
            self._add_step(each)
        if view.steps and all(each.has_ids for each in view.steps):
            chains, mismatches = find_chains(trajectory.steps)
            self._chains[len(chains)] += 1
            self._merged += MergeReport(
                steps=len(view.steps),
                sequences=len(chains),
                tokens_before=sum(each.step.length for each in view.steps),
                tokens_after=sum(view.steps[chain[-1]].step.length for chain in chains),
                mismatches=mismatches,
            )
        return _member(view)

    def add_group(self, group: GroupView) -> None:
        """Count a group."""
        self._groups += 1
        phase = group.members[0].id.phase
        flat, groups = self.flat.get(phase, (0, 0))
        if len(group.standing) > 1:
            self.flat[phase] = (flat + group.flat, groups + 1)

    def add_member(self, member: Member) -> None:
        """Count what the weights versions of a trajectory sampled, and look for its seed among those before it."""
        if member.sampler_seed is not None:
            first_of_seed = self._seeds.setdefault(member.sampler_seed, str(member.id))
            if first_of_seed != str(member.id) and len(self.copies) < _KEPT:
                self.copies.append((str(member.id), first_of_seed))
        if not member.versions:
            return
        known = self.versions.setdefault((member.id.phase, member.id.iteration), {})
        for version, tokens, step, token in member.versions:
            first = known.get(version)
            known[version] = (
                FirstUse(tokens, str(member.id), step, token)
                if first is None
                else first._replace(tokens=first.tokens + tokens)
            )

    def _add_template(self, view: TrajectoryView) -> None:
        provenance = view.trajectory.provenance
        recorded = provenance.get("template")
        if not isinstance(recorded, str):
            return
        self.templates[recorded, str(provenance.get("template_date", ""))] += 1
        if view.rendering is not None and view.rendering.digest != recorded:
            self.strange_templates[recorded] += 1

    def _add_step(self, view: StepView) -> None:
        step = view.step
        self.steps += 1
        self._samplers[step.sampler] += 1
        self._statuses[step.status] += 1
        self._finishes[step.finish_reason] += 1
        self._renderings[step.rendering or "unknown"] += 1
        if not view.has_ids:
            self._without_ids += 1
            return
        self.prompt_tokens += len(view.prompt_ids)
        self.response_tokens += len(view.response_ids)
        trained = int(np.count_nonzero(step.loss_mask)) if step.loss_mask is not None else 0
        self.trained_tokens += trained
        if step.sampler == "policy" and len(view.response_ids):
            self._add_end(view)
            self._add_logprobs(step)
        if len(step.weights_versions) > 1 and _goes_forward(step):
            self.in_flight.add((view.trajectory.id.phase, view.trajectory.id.iteration))

    def _add_end(self, view: StepView) -> None:
        step, ends = view.step, self.ends
        mask = step.loss_mask
        known = view.owner.rendering is not None
        ended = mask is not None and (view.ended_by is not None if known else True)
        ends.steps += 1
        if not ended or mask is None:
            ends.open += 1
        elif mask[-1]:
            ends.trained += 1
        else:
            ends.masked += 1
        if step.logprobs is None or mask is None:
            return
        zero = step.logprobs == 0
        ends.others += len(zero) - ended
        if not zero.any():
            return
        if ended and zero[-1] and mask[-1] and len(ends.free) < _KEPT:
            ends.free.append(self._place(view, step.length - 1))
        if ended:
            zero = zero[:-1]
        ends.free_others += int(np.count_nonzero(zero))
        start, count = _longest_row(zero & (mask[: len(zero)] == 1))
        if count > 1 and len(ends.free_rows) < _KEPT:
            ends.free_rows.append(self._place(view, len(view.prompt_ids) + start, count))

    def _add_logprobs(self, step: Step) -> None:
        if step.logprobs is None or not len(step.logprobs) or step.sampling is None or step.sampling.temperature <= 0:
            return
        known = self.logprobs
        known.tokens += len(step.logprobs)
        known.low = min(known.low, float(step.logprobs.min()))
        known.high = max(known.high, float(step.logprobs.max()))

    def _place(self, view: StepView, token: int, size: int = 1) -> Place:
        decode = view.rendering.decode if view.owner.rendering is not None else None
        return Place(str(view.trajectory.id), view.index, token, tokens_in_context(view.step, token, decode), size)

    def _add_reward(self, view: TrajectoryView) -> None:
        """Where the reward of an episode with a single rewarded turn sits."""
        rewarded = [each for each in view.steps if each.step.reward]
        if len(rewarded) != 1 or len(view.steps) < 2 or not view.trajectory.final:
            return
        (only,) = rewarded
        env = view.trajectory.env_id
        if only.index == len(view.steps) - 1:
            self.rewarded_last[env] += 1
        else:
            self.rewarded_early_count[env] += 1
            known = self.rewarded_early.setdefault(env, [])
            if len(known) < _KEPT:
                token = only.step.length - 1 if only.has_ids and only.step.length else None
                known.append(Place(str(view.trajectory.id), only.index, token, ""))

    # ---- what it came to --------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All figures, by name."""
        ends = self.ends
        flat, groups = (sum(pair[i] for pair in self.flat.values()) for i in (0, 1))
        merged = self._merged
        return {
            "trajectories": self.trajectories,
            "phases": _ordered(self._phases),
            "outcomes": _ordered(self.outcomes),
            "repeated_attempts": self._repeated,
            "groups": self._groups,
            "zero_variance_groups": flat,
            "zero_variance_share": flat / groups if groups else None,
            "steps": self.steps,
            "steps_without_ids": self._without_ids,
            "samplers": _ordered(self._samplers),
            "statuses": _ordered(self._statuses),
            "malformed_share": self._statuses["malformed"] / self.steps if self.steps else None,
            "finish_reasons": _ordered(self._finishes),
            "renderings": _ordered(self._renderings),
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "trained_tokens": self.trained_tokens,
            "end_of_turn": {"trained": ends.trained, "masked": ends.masked, "open": ends.open} if self.template else {},
            "logprobs_of_zero": {"end_of_turn": len(ends.free), "other_tokens": ends.free_others},
            "sequences_per_trajectory": {str(number): count for number, count in sorted(self._chains.items())},
            "merge_ratio": merged.merge_ratio,
            "mismatches": dict(merged.mismatches),
            "weights_versions": dict(sorted(self._version_tokens().items(), key=lambda item: _age(item[0]))),
            "templates": len({digest for digest, _ in self.templates}),
        }

    def _version_tokens(self) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for versions in self.versions.values():
            for version, use in versions.items():
                tokens[version] += use.tokens
        return tokens


def _goes_forward(step: Step) -> bool:
    """Whether a response was begun by older weights and ended by newer ones."""
    first, last = str(step.weights_versions[0][0]), str(step.weights_versions[-1][0])
    return first != last and newest([last, first]) == last


def newest(versions: Sequence[str]) -> str:
    """The newest of some weights versions: `update-12` is newer than `update-9`, and equal ones are all the newest."""
    return max(versions, key=_age)


def _age(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(version)]


def _longest_row(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest row of true flags begins, and how long it is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _member(view: TrajectoryView) -> Member:
    trajectory = view.trajectory
    seeds = trajectory.seeds
    versions: dict[str, tuple[int, int, int]] = {}
    for each in view.steps:
        if not each.has_ids or each.step.sampler != "policy":
            continue
        for version, start, end in each.step.weights_versions:
            tokens, step, token = versions.get(str(version), (0, each.index, len(each.prompt_ids) + int(start)))
            versions[str(version)] = (tokens + max(0, int(end) - int(start)), step, token)
    return Member(
        id=trajectory.id,
        final=trajectory.final,
        outcome=Outcome(trajectory.outcome),
        reward=trajectory.reward,
        success=trajectory.success,
        steps=len(view.steps),
        env_seed=seeds.get("env"),
        sampler_seed=seeds.get("sampler"),
        task=_digest(dict(trajectory.task)),
        opening=_opening(view),
        said=_said(view),
        versions=tuple((version, *rest) for version, rest in versions.items()),
    )


def _opening(view: TrajectoryView) -> int | None:
    """Digest of what the environment said first; an agent of its own may have put it in other words."""
    first = view.steps[0].step if view.steps else None
    if (
        first is None
        or first.follows is not None
        or not first.new_messages
        or view.trajectory.provenance.get("agent", PLAIN_LOOP) != PLAIN_LOOP
    ):
        return None
    return _digest(list(first.new_messages))


def _said(view: TrajectoryView) -> Said | None:
    digest, logprob = 0, 0.0
    for each in view.steps:
        step, sampling = each.step, each.step.sampling
        if step.sampler != "policy" or not each.has_ids or step.logprobs is None or sampling is None:
            return None
        if sampling.temperature <= 0 or sampling != Sampling(temperature=sampling.temperature):
            return None
        digest = zlib.crc32(each.response_ids.tobytes(), digest)
        logprob += float(step.logprobs.sum())
    return Said(digest, logprob)


def _digest(value: Any) -> int:
    return zlib.crc32(dump_json(value, sort_keys=True).encode(errors="replace"))


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common())
