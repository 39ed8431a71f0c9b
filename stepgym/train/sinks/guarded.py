"""A sink that cannot end a run: what it raises becomes a line."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepgym.run.folder import write_whole
from stepgym.train.sinks.base import RunInfo, Sink

logger = logging.getLogger(__name__)

PATIENCE = 3
"""After so many failures in a row a sink is left alone."""


class GuardedSink:
    """A sink as a run uses it: its failures are told, once in a row, and never raised.

    `sinks/KIND.json` in the run's folder keeps the run's id and the last iteration that was written, so that a resumed
    run goes on in the same place and writes no iteration twice.

    Args:
        kind: The sink's name.
        sink: The sink.
        tell: Told in one line where the metrics are, and what failed.
    """

    def __init__(self, kind: str, sink: Sink, tell: Callable[[str], None]) -> None:
        self._kind = kind
        self._sink = sink
        self._tell = tell
        self._on = False
        self._failures = 0
        self._record = Path()
        self._id = ""
        self._written = 0

    def open(self, run: RunInfo) -> None:
        """Open the sink under the id that this run has there."""
        self._record = run.folder / "sinks" / f"{self._kind.replace(':', '-').replace('/', '-')}.json"
        self._on = True
        self._try(lambda: self._open(run), final=True)

    def _open(self, run: RunInfo) -> None:
        self._id, self._written = _read(self._record)
        self._sink.open(replace(run, id=self._id))
        if self._sink.cuts_back:
            self._written = run.after or 0
        self._keep()
        if address := self._sink.address:
            self._tell(f"{self._kind}: {address}")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the finite numbers of an iteration, unless the sink has that iteration already."""
        if step <= self._written:
            return
        finite = {name: float(value) for name, value in metrics.items() if _is_finite(value)}

        def write() -> None:
            self._sink.write(step, finite)
            self._written = step
            self._keep()

        self._try(write)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Pass an alarm on, unless the iteration is done again."""
        if step > self._written:
            self._try(lambda: self._sink.alarm(step, name, text))

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Close the sink."""
        numbers = None
        if summary is not None:
            numbers = {name: float(value) for name, value in summary.items() if _is_finite(value)}
        self._try(lambda: self._sink.close(numbers), final=True)
        self._on = False

    def _try(self, action: Callable[[], None], *, final: bool = False) -> None:
        if not self._on:
            return
        try:
            action()
        except Exception as error:
            logger.debug("sink %s", self._kind, exc_info=True)
            self._failures += 1
            self._on = not final and self._failures < PATIENCE
            if self._failures == 1 or not self._on:
                what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                then = "it is tried again" if self._on else "the run goes on without it; metrics.jsonl has everything"
                self._tell(f"sink {self._kind}: {what}; {then}")
        else:
            self._failures = 0

    def _keep(self) -> None:
        self._record.parent.mkdir(exist_ok=True)
        write_whole(self._record, json.dumps({"id": self._id, "written": self._written}) + "\n")


def _read(record: Path) -> tuple[str, int]:
    """The run's id at a sink, and the last iteration that was written."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return str(found["id"]), int(found["written"])
    except FileNotFoundError:
        return uuid.uuid4().hex[:12], 0


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
