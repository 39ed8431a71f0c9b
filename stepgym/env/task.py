"""What an episode is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepgym.errors import UserError


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to be solved. Frozen; all of it is JSON.

    Attributes:
        id: Unique within its split.
        prompt: What the agent is asked, as text. Environments may wrap it in instructions.
        answer: What scoring compares with; the agent never sees it.
        data: Anything else the environment needs.
    """

    id: str
    prompt: str = ""
    answer: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A row that `from_dict` reads back."""
        return {"id": self.id, "prompt": self.prompt, "answer": self.answer, "data": dict(self.data)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Task:
        """Read one row of a table of tasks. Raises `UserError` when the id is missing or a field is unknown."""
        unknown = set(row) - {"id", "prompt", "answer", "data"}
        if "id" not in row or unknown:
            what = f"unknown field {sorted(unknown)[0]!r}" if unknown else "no field 'id'"
            raise UserError(f"task row has {what}; a task has id, prompt, answer, data")
        return cls(
            id=str(row["id"]),
            prompt=row.get("prompt") or "",
            answer=row.get("answer"),
            data=dict(row.get("data") or {}),
        )
