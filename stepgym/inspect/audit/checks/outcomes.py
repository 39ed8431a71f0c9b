"""Checks of outcomes: that an episode ended as its steps say, and that failures are few."""

from __future__ import annotations

from collections.abc import Iterator

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.statistics import Statistics
from stepgym.inspect.audit.views import TrajectoryView
from stepgym.record.outcome import Fault as Blame
from stepgym.record.outcome import Outcome

_MANY = 0.2
"""Share of samples that failed above which a run is not worth much; a rollout stops at the same share."""


@check("trajectory")
def outcome(view: TrajectoryView) -> Iterator[Fault]:
    """An outcome is what the steps say: an episode that the agent played has turns and a reward, and one that ended by
    a malformed or truncated turn holds one.
    """
    trajectory = view.trajectory
    ended = trajectory.outcome
    if ended.fault not in (Blame.NONE, Blame.AGENT):
        return
    if trajectory.reward is None:
        yield Fault(f"the outcome is {ended}, and yet there is no reward")
    if not view.steps:
        if view.trained:
            yield Fault(f"the outcome is {ended}, and yet the model said nothing", severity="warning")
        return
    statuses = {each.step.status for each in view.steps}
    if ended is Outcome.RESPONSE_TRUNCATED and "truncated" not in statuses:
        yield Fault(f"the outcome is {ended}, and yet no turn was truncated", severity="warning")
    if ended is Outcome.MALFORMED_ACTION and statuses == {"ok"}:
        yield Fault(f"the outcome is {ended}, and yet every turn could be read", severity="warning")


@check("run", name="outcome")
def _failures(run: Statistics) -> Iterator[Fault]:
    failed = {name: count for name, count in run.outcomes.items() if not Outcome(name).scored}
    count, total = sum(failed.values()), sum(run.outcomes.values())
    if count:
        listed = ", ".join(f"{name} {number}" for name, number in failed.items())
        yield Fault(
            f"{count} of {total} samples failed and count for nothing ({listed})",
            severity="warning" if count > _MANY * total else "note",
        )
