"""Checks of groups: the samples of one task in one batch, which share a baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import TRAINED_PHASE, GroupView

_BY_CHANCE = -50.0
"""Logprob, in nats, under which nothing is sampled twice."""


@check("run", name="duplicate_trajectory")
def _same_seed(run: Statistics) -> Iterator[Fault]:
    for copy, first in run.copies:
        yield Fault(f"it was sampled with the seed of {first}: the same episode, counted twice", trajectory=copy)


@check("group", name="duplicate_trajectory")
def _said_again(group: GroupView) -> Iterator[Fault]:
    """Long responses that are the same token for token, though by their logprobs that never happens by chance."""
    said: dict[int, str] = {}
    for member in group.members:
        if member.said is None or member.said.logprob > _BY_CHANCE:
            continue
        first = said.setdefault(member.said.digest, str(member.id))
        if first != str(member.id):
            yield Fault(
                f"it says token for token what {first} says, which has a chance of e^{member.said.logprob:.0f}: "
                "one seed sampled both, or one was copied",
                trajectory=str(member.id),
            )


@check("group")
def missing_samples(group: GroupView) -> Iterator[Fault]:
    """A group has all its samples, each with an attempt that stands."""
    samples = {member.id.sample for member in group.members}
    final = {member.id.sample for member in group.members if member.final}
    expected = max(group.expected or 0, max(samples) + 1)
    missing = sorted(set(range(expected)) - samples - group.unread)
    open_ended = sorted(samples - final)
    if missing:
        yield Fault(f"samples {_few(missing)} of {expected} are missing", severity="warning", trajectory=group.name)
    if open_ended:
        yield Fault(f"samples {_few(open_ended)} have no final attempt", severity="warning", trajectory=group.name)


@check("group")
def group_differs(group: GroupView) -> Iterator[Fault]:
    """The samples of a group are of one task, in environments with one seed."""
    for name, what in (("task", "task"), ("env_seed", "environment's seed")):
        values = [getattr(member, name) for member in group.members]
        known = [value for value in values if value is not None]
        common = Counter(known).most_common(1)[0][0] if known else None
        for member, value in zip(group.members, values, strict=True):
            if value is not None and value != common:
                yield Fault(f"its {what} is not that of its group", trajectory=str(member.id))
    began = [member for member in group.members if member.opening is not None]
    openings: dict[int | None, Counter[int | None]] = {}
    for member in began:
        openings.setdefault(member.env_seed, Counter())[member.opening] += 1
    for member in began:
        if member.opening != openings[member.env_seed].most_common(1)[0][0]:
            yield Fault(
                "its conversation begins with other messages than its group's, with one task and one seed",
                severity="warning",
                step=0,
                trajectory=str(member.id),
            )


@check("group")
def zero_variance(group: GroupView) -> Iterator[Fault]:
    """Groups whose members all have one reward teach nothing; a run in which most are is mostly waste.

    A note for each training group, and one where they are more than half.
    """
    if group.flat and group.members[0].id.phase == TRAINED_PHASE:
        members = group.standing
        yield Fault(f"all {len(members)} members have the reward {members[0].reward:g}", severity="note")


@check("run", name="zero_variance")
def _mostly_waste(run: Statistics) -> Iterator[Fault]:
    flat, groups = run.flat.get(TRAINED_PHASE, (0, 0))
    if groups and flat / groups > 0.5:
        yield Fault(
            f"{flat} of {groups} training groups have members of one and the same reward ({flat / groups:.0%})",
            severity="note",
        )


def _few(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
