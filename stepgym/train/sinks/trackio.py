"""Metrics to trackio."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, ClassVar

from stepgym.train.sinks.base import RunInfo, Sink

logger = logging.getLogger(__name__)


class TrackioSink(Sink):
    """Logs to trackio: a local database (TRACKIO_DIR), or a Hugging Face Space. Look with `trackio show`.

    A resumed run goes on under the same name (`resume="allow"`).

    Args:
        project: Name of the project.
        name: Name of the run; None: the folder's, and an id.
        group: To find the run by.
        space_id: A Space that keeps the metrics; None: this machine.
        server_url: A trackio server of one's own that keeps them.
    """

    requires: ClassVar[str | None] = "trackio"

    def __init__(
        self,
        *,
        project: str = "stepgym",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
    ) -> None:
        self._options = {"project": project, "group": group, "space_id": space_id, "server_url": server_url}
        self._name = name
        self._run: Any = None

    @property
    def address(self) -> str | None:
        """How to look at the run."""
        return f"trackio show --project {self._options['project']}"

    def open(self, run: RunInfo) -> None:
        """Begin the run, or go on with the one of this name."""
        import trackio

        name = self._name or f"{run.name}-{run.id}".replace("/", "-")
        with _quietly():
            self._run = trackio.init(**self._options, name=name, config=dict(run.config), resume="allow", embed=False)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log; trackio writes it in the background."""
        self._run.log(dict(metrics), step=step)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Send an alert, which trackio passes on where it is told to (TRACKIO_WEBHOOK_URL)."""
        with _quietly():
            self._run.alert(title=f"{name} (iteration {step})", text=text)

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Wait until all is written."""
        if self._run is None:
            return
        import trackio

        with _quietly():
            trackio.finish()


@contextmanager
def _quietly() -> Iterator[None]:
    """Log what trackio prints: stdout is for results."""
    with redirect_stdout(io.StringIO()) as said:
        yield
    for line in said.getvalue().splitlines():
        logger.debug("%s", line)
