"""Finding one trajectory of a store by its id, by how the id begins, or by its reward."""

from __future__ import annotations

from typing import Literal, NamedTuple

from stepgym.errors import UserError
from stepgym.inspect.plain_text import plain
from stepgym.record.json_text import load_text
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import TrajectoryId

Pick = Literal["first", "worst", "best"]

_LISTED = 6


class _Candidate(NamedTuple):
    key: TrajectoryId
    final: bool
    reward: float | None


def find_trajectory(store: TrajectoryStore, name: str | None = None, pick: Pick | None = None) -> TrajectoryId:
    """The id that a name stands for.

    Args:
        store: Where to look.
        name: An id as `str(TrajectoryId)` writes it, or how one begins. Whole parts come first: `train/0/1` means task
            `1` even where there is a task `17`.
        pick: Of those whose ids begin so (all, without a name): the `first` by id, or of the final ones that were
            scored the one of the lowest (`worst`) or highest (`best`) reward, the first by id of several.

    Raises:
        UserError: None fits, or several do; they are named in one line.
    """
    rows = store.table(["id", "final", "reward"]).to_pylist()
    all_of_them = [_Candidate(TrajectoryId.parse(load_text(r["id"])), r["final"], r["reward"]) for r in rows]
    if not all_of_them:
        raise UserError(f"{store.path}: the run has no trajectories yet")
    all_of_them.sort()
    example = plain(str(all_of_them[0].key))
    if name is None and pick is None:
        raise UserError(
            f"which trajectory? Give an id such as {example}, how one begins, or --first, --worst or --best"
        )
    candidates = _beginning(all_of_them, name or "")
    if not candidates:
        raise UserError(f"{store.path}: no trajectory's id begins with {name!r}; the first is {example}")
    if pick in ("worst", "best"):
        scored = [candidate for candidate in candidates if candidate.final and candidate.reward is not None]
        if not scored:
            raise UserError(f"{store.path}: none of these {len(candidates)} trajectories has a reward")
        by_reward = min if pick == "worst" else max
        return by_reward(scored, key=lambda candidate: candidate.reward or 0.0).key
    if pick is None and len(candidates) > 1:
        listed = ", ".join(plain(str(candidate.key)) for candidate in candidates[:_LISTED])
        more = f" and {len(candidates) - _LISTED} more" if len(candidates) > _LISTED else ""
        raise UserError(f"{name!r} fits {len(candidates)} trajectories: {listed}{more}")
    return candidates[0].key


def _beginning(candidates: list[_Candidate], name: str) -> list[_Candidate]:
    exact = [candidate for candidate in candidates if str(candidate.key) == name]
    parts = exact or [candidate for candidate in candidates if str(candidate.key).startswith(name.rstrip("/") + "/")]
    return parts or [candidate for candidate in candidates if str(candidate.key).startswith(name)]
