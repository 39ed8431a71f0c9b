"""Lots: the rollouts of one iteration of training, begun ahead of time where they overlap with it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepgym.env.worker import Background, start_background
from stepgym.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Lot:
    """The rollouts of one iteration.

    Attributes:
        iteration: Which one.
        learned: The trajectories that are learned from, by task and sample.
        left_out: Those that were played but are not learned from: their group was replaced, or they were too old.
        metrics: What was left out and why, in numbers.
    """

    iteration: int
    learned: tuple[Trajectory, ...]
    left_out: tuple[Trajectory, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def played(self) -> tuple[Trajectory, ...]:
        """All of its trajectories."""
        return self.learned + self.left_out


class Lots:
    """Plays lots on the event loop in the background, in order, some of them before they are asked for.

    Args:
        play: Plays the lot of an iteration.
        ahead: Lots that are begun beside the one that is asked for; 0: each is begun when it is asked for.
        last: The last iteration.
    """

    def __init__(self, play: Callable[[int], Coroutine[Any, Any, Lot]], *, ahead: int, last: int) -> None:
        self._play = play
        self._ahead = ahead
        self._last = last
        self._begun: dict[int, Background[Lot]] = {}

    def begin(self, iteration: int) -> None:
        """Begin the lot of an iteration, and those ahead of it unless one has failed already."""
        for number in range(iteration, min(iteration + self._ahead, self._last) + 1):
            if number in self._begun:
                continue
            if any(lot.failed for lot in self._begun.values()):
                return
            self._begun[number] = start_background(self._play(number))

    def take(self, iteration: int) -> Lot:
        """Wait for the lot of an iteration, which must have begun, and let go of it. Raises what went wrong in it."""
        lot = self._begun[iteration].result()
        del self._begun[iteration]
        return lot

    def join(self) -> None:
        """Wait until nothing is in flight. Raises what went wrong in the earliest lot that failed."""
        for number in sorted(self._begun):
            self._begun[number].result()

    def close(self) -> None:
        """End what is in flight: episodes are cancelled, their environments closed, what was played is stored."""
        for lot in self._begun.values():
            if not lot.done:
                lot.cancel()
        self._begun.clear()
