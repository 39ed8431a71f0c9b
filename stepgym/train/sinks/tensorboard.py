"""Metrics as TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stepgym.train.sinks.base import RunInfo, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(Sink):
    """Writes event files. Look at them with `tensorboard --logdir runs`.

    A resumed run tells TensorBoard to forget what was written after the iteration that it goes on from.

    Args:
        folder: Where the files go; by default `tensorboard` in the run's folder. In another folder each run has one
            of its own.
    """

    requires: ClassVar[str | None] = "tensorboard"
    cuts_back: ClassVar[bool] = True

    def __init__(self, *, folder: str | None = None) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    @property
    def address(self) -> str | None:
        """How to look at the files."""
        return None if self._writer is None else f"tensorboard --logdir {self._writer.log_dir}"

    def open(self, run: RunInfo) -> None:
        """Begin a new event file; readers take those of one folder together."""
        from torch.utils.tensorboard import SummaryWriter

        path = Path(self._folder) / run.name if self._folder else run.folder / "tensorboard"
        before = any(path.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(path), purge_step=(run.after or 0) + 1 if before else None)
        if not before:
            text = json.dumps(run.config, indent=2, default=str)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars, and to the disk at once: a killed run loses none."""
        assert self._writer is not None
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def alarm(self, step: int, name: str, text: str) -> None:
        """Write the alarm as text."""
        assert self._writer is not None
        self._writer.add_text("alarms", text, step)

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Write the summary as text."""
        if self._writer is None:
            return
        if summary is not None:
            self._writer.add_text("summary", "".join(f"    {name}: {value}\n" for name, value in summary.items()))
        self._writer.close()
