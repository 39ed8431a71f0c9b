"""The advantages that training gave a trajectory's steps, computed anew from the run's config and the stored group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepgym.config import validate_kwargs
from stepgym.credit import CREDITS
from stepgym.credit.group import assign, has_signal
from stepgym.credit.treatment import treat
from stepgym.errors import UserError
from stepgym.inspect.recorded_run import RecordedRun
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.trajectory import Trajectory

DEFAULT_CREDIT = "grpo"
"""What a recipe without `algorithm.credit` trains with; a test compares it with the learner's own default."""

TRAINED_PHASE = "train"


class StepAdvantages(NamedTuple):
    """One advantage per step, or None and the reason why it is not known or was not used."""

    values: tuple[float, ...] | None
    note: str


def step_advantages(run: RecordedRun, trajectory: Trajectory, group: Sequence[Trajectory]) -> StepAdvantages:
    """What training made of a trajectory.

    Args:
        run: The run, whose config names the credit and the outcome policy.
        trajectory: One of its trajectories.
        group: Every stored trajectory of its group, itself included, with steps.
    """
    if not run.config or "play" in run.config:
        return StepAdvantages(None, "unknown: not the run of a training")
    if trajectory.id.phase != TRAINED_PHASE:
        return StepAdvantages(None, f"none: the phase {trajectory.id.phase} is not trained on by reinforcement")
    if not trajectory.final:
        return StepAdvantages(None, "none: this attempt was repeated, only the last one counts")
    try:
        kind, options = _credit(run.section("algorithm").get("credit", DEFAULT_CREDIT))
        function = CREDITS.get(kind)
        options = validate_kwargs(function, options, "algorithm.credit")
        groups, _ = treat(group, OutcomePolicy.from_config(run.section("outcomes")))
        members = groups[0].members if groups else ()
        place = next((i for i, member in enumerate(members) if member.trajectory.id == trajectory.id), None)
        if place is None:
            return StepAdvantages(None, f"none: {trajectory.outcome} is masked or dropped, as if never drawn")
        rewards = groups[0].rewards
        advantages = assign(function, rewards, options)
    except (UserError, ValueError) as error:
        return StepAdvantages(None, f"unknown: {' '.join(str(error).split())}")
    note = f"{kind}, {len(members)} of the group count"
    if not has_signal(rewards, advantages) and run.section("algorithm").get("zero_variance", "drop") == "drop":
        return StepAdvantages(None, f"none: the group has no signal and was dropped ({note})")
    return StepAdvantages(tuple(advantages[place].tolist()), note)


def _credit(given: object) -> tuple[str, dict[str, object]]:
    """The name and the options of a credit, which a config gives as a name or as a mapping with `kind`."""
    if isinstance(given, Mapping):
        return str(given.get("kind")), {str(name): value for name, value in given.items() if name != "kind"}
    return str(given), {}
