"""The advantages that training gave a trajectory, computed anew from the run's config and the stored rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stepgym.config import validate_kwargs
from stepgym.credit import CREDITS
from stepgym.credit.group import assign_all, has_signal
from stepgym.credit.level import Level, level
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


def step_advantages(
    run: RecordedRun,
    trajectory: Trajectory,
    group: Sequence[Trajectory],
    batch: Callable[[], Iterable[Trajectory]],
) -> StepAdvantages:
    """What training made of a trajectory.

    Args:
        run: The run, whose config names the credit and the outcome policy.
        trajectory: One of its trajectories.
        group: Every stored trajectory of its group, itself included, with steps.
        batch: Reads every stored trajectory of its phase and iteration; called where the credit looks at a whole batch.
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
        members, _ = treat(group, OutcomePolicy.from_config(run.section("outcomes")))
        if not any(member.trajectory.id == trajectory.id for found in members for member in found.members):
            return StepAdvantages(None, f"none: {trajectory.outcome} is masked or dropped, as if never drawn")
        unknown = _not_known_afterwards(run, trajectory.id.iteration, level(function), kind)
        if unknown:
            return StepAdvantages(None, f"unknown: {unknown}")
        whole = level(function) == "batch"
        groups = treat(batch(), OutcomePolicy.from_config(run.section("outcomes")))[0] if whole else members
        rewards = [found.rewards for found in groups]
        advantages = assign_all(function, rewards, options)
    except (UserError, ValueError) as error:
        return StepAdvantages(None, f"unknown: {' '.join(str(error).split())}")
    own = next(i for i, found in enumerate(groups) if found.key == trajectory.id.group)
    place = next(i for i, member in enumerate(groups[own].members) if member.trajectory.id == trajectory.id)
    note = f"{kind}, {len(groups[own].members)} of the group count"
    if whole:
        note += f", {len(groups)} groups in the batch"
    kept = run.section("algorithm").get("zero_variance", "drop") != "drop"
    if not kept and not has_signal(rewards[own], advantages[own], function, options):
        return StepAdvantages(None, f"none: the group has no signal and was dropped ({note})")
    return StepAdvantages(tuple(advantages[own][place].tolist()), note)


def _not_known_afterwards(run: RecordedRun, iteration: int, looks_at: Level, kind: str) -> str:
    """Why what is on disk does not say what the advantages were; empty where it does."""
    if looks_at == "token":
        return f"{kind} gives each token an advantage of its own, from a critic's values that were not kept"
    kl = run.section("algorithm").get("kl")
    if isinstance(kl, Mapping) and kl.get("applies_to") == "reward" and kl.get("kind", "none") != "none":
        return "the KL to the reference was taken off the rewards, and it was not kept"
    # The config says what may have been left out of the batch, and the iteration's metrics whether anything was.
    row = _metrics(run, iteration)
    if run.section("overlap").get("max_staleness") and (row is None or row.get("stale_dropped")):
        return "trajectories of this iteration were left out as stale, and which ones was not kept"
    if looks_at == "batch" and run.section("refill").get("rounds") and (row is None or row.get("refilled_groups")):
        return f"{kind} looks at a whole batch, and groups of this one were replaced, which ones was not kept"
    return ""


def _metrics(run: RecordedRun, iteration: int) -> Mapping[str, object] | None:
    """What the run wrote about an iteration; None where it wrote nothing."""
    file = run.path / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # half a line, of a run that was killed
            continue
        if isinstance(row, dict) and row.get("iteration") == iteration and "warm_start" not in row:
            return row
    return None


def _credit(given: object) -> tuple[str, dict[str, object]]:
    """The name and the options of a credit, which a config gives as a name or as a mapping with `kind`."""
    if isinstance(given, Mapping):
        return str(given.get("kind")), {str(name): value for name, value in given.items() if name != "kind"}
    return str(given), {}
