"""Metrics to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from stepgym.train.sinks.base import RunInfo, Sink


class WandbSink(Sink):
    """Logs to Weights & Biases, in a process of its own that `wandb` starts.

    A resumed run goes on under the same id (`resume="allow"`). The address and key of the server are `wandb`'s own
    affair (`wandb login`, WANDB_API_KEY, WANDB_BASE_URL). Offline runs lie in the run's folder, for `wandb sync`.

    Args:
        project: Name of the project.
        entity: User or team; None: the account's default.
        name: Name of the run; None: the folder's.
        group, tags, notes: To find the run by.
        mode: `online`, `offline`, or None for what WANDB_MODE says.
    """

    requires: ClassVar[str | None] = "wandb"

    def __init__(
        self,
        *,
        project: str = "stepgym",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        self._options = {"project": project, "entity": entity, "group": group, "notes": notes, "mode": mode}
        self._name = name
        self._tags = tuple(tags)
        self._run: Any = None

    @property
    def address(self) -> str | None:
        """The run's page, or offline what uploads it."""
        if self._run is None:
            return None
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def open(self, run: RunInfo) -> None:
        """Begin the run, or go on with the one of this id."""
        import wandb

        self._run = wandb.init(
            **self._options,
            id=run.id,
            name=self._name or run.name,
            tags=self._tags,
            config=dict(run.config),
            dir=str(run.folder),
            resume="allow",
            reinit="create_new",
            # The console is the run's own: wandb neither captures it nor writes to it.
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log; `wandb` sends it in the background."""
        self._run.log(dict(metrics), step=step, commit=True)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Send an alert, which `wandb` passes on as its user has set."""
        self._run.alert(title=f"{name} (iteration {step})", text=text, level="WARN")

    def close(self, summary: Mapping[str, float] | None) -> None:
        """Add the summary, and wait until all is sent."""
        if self._run is None:
            return
        if summary is not None:
            self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary is not None else 1)
