"""How far a long work is, told to the log now and then."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("stepgym.progress")
"""The command line shows what is told here."""

FIRST_SECONDS = 5.0
NEXT_SECONDS = 15.0


class LongWork:
    """Tells how far a work is that may take long: nothing in its first seconds, then a line now and then.

    Args:
        what: What is done, such as `reading corpus.jsonl`.
        total: How much there is to do, in `unit`s.
        unit: What is counted, such as `passages`.
    """

    def __init__(self, what: str, total: float, unit: str) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._next = time.monotonic() + FIRST_SECONDS
        self._told = False

    def at(self, done: float) -> None:
        """So much is done."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_SECONDS
            self._told = True
            logger.info("%s: %s of %s %s", self._what, _shown(done), _shown(self._total), self._unit)

    def then(self, what: str) -> None:
        """What begins now belongs to the work and cannot be counted; told unless all went quickly so far."""
        if self._told:
            logger.info("%s", what)


def _shown(number: float) -> str:
    return f"{number:,.1f}" if isinstance(number, float) else f"{number:,}"
