"""What a training run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Observer:
    """Told what happens during a run; does nothing. Displays and sinks override what they care about."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage has begun (`rollout`, `warm start`, ...), with so many things to do, where that is known."""

    def doing(self, text: str) -> None:
        """What the stage is waiting for, in a line that replaces the one before. May be called from any thread."""

    def advance(self, done: int, numbers: Mapping[str, float]) -> None:
        """So many things of the stage are done, and how it stands."""

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        """An iteration has ended, with all of its metrics."""

    def alarm(self, name: str, text: str) -> None:
        """Something that precedes a collapse has moved; a note unless overridden."""
        self.note(f"alarm: {text}")
