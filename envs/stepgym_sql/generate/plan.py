"""A question, its gold query, and the decisions on the way to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Decision: TypeAlias = Literal["values", "column"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the gold query that has to be decided by looking.

    Attributes:
        right: What belongs there.
        wrong: What stands there when the decision is wrong; None where there is nothing to decide.
        decision: `values` (the stored spelling, seen by looking at the values) or `column` (which of those seen).
        look: The query that shows what to put there, for `values`.
    """

    right: str
    wrong: str | None
    decision: Decision
    look: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A question and how it is answered.

    Attributes:
        question: In plain words.
        template: The gold query with `{name}` for each slot.
        slots: By name.
    """

    question: str
    template: str
    slots: dict[str, Slot] = field(default_factory=dict)

    def sql(self, wrong: Collection[str] = ()) -> str:
        """The query with the slots named in `wrong` decided wrongly; the gold query by default."""
        return self.template.format(
            **{name: slot.wrong or slot.right if name in wrong else slot.right for name, slot in self.slots.items()}
        )

    @property
    def open_slots(self) -> list[str]:
        """The slots that can be decided wrongly."""
        return [name for name, slot in self.slots.items() if slot.wrong is not None]

    @property
    def looks(self) -> list[str]:
        """The queries that show the stored spellings, each once."""
        return list(dict.fromkeys(slot.look for slot in self.slots.values() if slot.look is not None))


def quote(text: str) -> str:
    """A text literal."""
    return "'" + text.replace("'", "''") + "'"
