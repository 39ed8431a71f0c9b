"""One trajectory with all that belongs to it: its group, and the advantages that training gave it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stepgym.inspect.advantage import step_advantages
from stepgym.inspect.recorded_run import RecordedRun
from stepgym.inspect.selection import Pick, find_trajectory
from stepgym.record.json_text import dump_json
from stepgym.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Sibling:
    """An attempt of the same group.

    Attributes:
        sample, attempt: Which one.
        final: Whether it stands.
        outcome: Why it ended.
        reward: As the environment gave it; None where it could not be scored.
    """

    sample: int
    attempt: int
    final: bool
    outcome: str
    reward: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A trajectory and what belongs to it.

    Attributes:
        trajectory: The record.
        group: Every attempt of its group, itself included, by sample and attempt.
        advantages: One per step, computed anew; None where there are none.
        advantage_note: The credit that gave them, or why there are none.
    """

    trajectory: Trajectory
    group: tuple[Sibling, ...]
    advantages: tuple[float, ...] | None
    advantage_note: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON: the whole record, ids and all. What JSON cannot hold is as `stepgym.record.json_text`."""
        record = {**_fields(self.trajectory), "steps": [_fields(step) for step in self.trajectory.steps]}
        record["id"] = str(self.trajectory.id)
        plain: dict[str, Any] = json.loads(
            dump_json(
                {
                    "trajectory": record,
                    "group": [asdict(sibling) for sibling in self.group],
                    "advantages": self.advantages,
                    "advantage_note": self.advantage_note,
                }
            )
        )
        return plain


def show(path: str | os.PathLike[str], name: str | None = None, *, pick: Pick | None = None) -> Shown:
    """Look up one trajectory of a run.

    Args:
        path: A run's folder, or a folder of trajectories.
        name: Its id (`phase/iteration/task/sample/attempt`), or how it begins.
        pick: `first`, `worst` or `best` of those that fit the name; see `find_trajectory`.

    Raises:
        UserError: There is no such run, or none or several trajectories fit.
    """
    run = RecordedRun.of(path)
    with run.store() as store:
        key = find_trajectory(store, name, pick)
        group = list(store.read(phase=key.phase, iteration=key.iteration, task_id=key.task_id))
        group.sort(key=lambda trajectory: trajectory.id)
        trajectory = next(member for member in group if member.id == key)
        found = step_advantages(
            run, trajectory, group, lambda: store.read(final_only=True, phase=key.phase, iteration=key.iteration)
        )
    siblings = tuple(Sibling(t.id.sample, t.id.attempt, t.final, str(t.outcome), t.reward) for t in group)
    return Shown(trajectory, siblings, found.values, found.note)


def _fields(record: Any) -> Mapping[str, Any]:
    """The fields of a record by name; nested ones (how a step was sampled) as mappings too."""
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}
    if values.get("sampling") is not None:
        values["sampling"] = asdict(values["sampling"])
    return values
