"""What a run left behind: its folder, or a bare folder of trajectories, opened for looking at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepgym.config import load_yaml
from stepgym.errors import UserError
from stepgym.record.store import TrajectoryStore


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run on disk.

    Attributes:
        path: What was named: the run's folder, or a folder of Parquet shards.
        trajectories: The folder of the trajectory store.
        config: The resolved `config.yaml`; empty for a bare store.
    """

    path: Path
    trajectories: Path
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> RecordedRun:
        """The run at `path`. Raises `UserError` where there is none, or its config cannot be read."""
        folder = Path(path)
        if not folder.exists():
            raise UserError(f"{folder}: no such run; name a run's folder or a folder of trajectories")
        if not folder.is_dir():
            raise UserError(f"{folder}: a run is a folder, this is a file")
        store = folder / "trajectories"
        if store.is_dir():
            config = folder / "config.yaml"
            return cls(folder, store, load_yaml(config) if config.exists() else {})
        if not any(folder.glob("*.parquet")):
            raise UserError(f"{folder}: neither a run's folder (no trajectories/) nor a store (no *.parquet)")
        return cls(folder, folder)

    def store(self) -> TrajectoryStore:
        """The trajectory store, open for reading. Raises `UserError` as of `TrajectoryStore`."""
        return TrajectoryStore(self.trajectories)

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; empty where it has none."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}
