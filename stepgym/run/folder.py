"""A run's folder: config, trajectories, metrics, summary. Made once, resumed by the same config only."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgym.config import to_jsonable
from stepgym.errors import UserError

if TYPE_CHECKING:
    from stepgym.model.renderer import Renderer


class RunFolder:
    """A run's folder.

    It holds `config.yaml`, `run.json`, `renderer/`, `trajectories/`, `metrics.jsonl`, `summary.json`, `checkpoints/`.

    Args:
        path: The folder; made where there is none.
        config: The resolved config, written as YAML.
        digest: Identifies the config. A folder in which another one has recorded something is refused.

    Attributes:
        path: The folder.
        resumed: Whether this config's run was there before.

    Raises:
        UserError: The folder belongs to another config, is not a run's, cannot be written, or is in use by another
            process.
    """

    def __init__(self, path: str | os.PathLike[str], *, config: Mapping[str, Any], digest: str) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path}: a run is a folder, this is a file; give another --out")
        identity = self.path / "run.json"
        if not identity.exists() and self.path.exists() and not all(map(_is_leftover, self.path.iterdir())):
            raise UserError(f"{self.path}: the folder is not empty and not a run's; give another --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise UserError(f"{self.path}: cannot write here: {error.strerror}; give another --out") from None
        try:
            found = _digest_in(identity) if identity.exists() else None
            self.resumed = found == digest
            # A run that failed before it had recorded anything (a mistake in its config, say) keeps nobody out.
            if found not in (None, digest) and self._has_results():
                raise UserError(
                    f"{self.path}: this run was made with another config (digest {found}, now {digest}); "
                    "use its config.yaml, or give another --out"
                )
            if not self.resumed:
                write_whole(identity, json.dumps({"digest": digest, "started_at": time.time()}, indent=2) + "\n")
            if not self.resumed or not (self.path / "config.yaml").exists():
                _write_yaml(self.path / "config.yaml", to_jsonable(config))
        except BaseException as error:
            self._lock.close()
            if isinstance(error, OSError):
                raise UserError(f"{self.path}: cannot write here: {error.strerror}; give another --out") from None
            raise

    @property
    def trajectories(self) -> Path:
        """Where the trajectory store is."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def keep_renderer(self, renderer: Renderer) -> Renderer:
        """Write what the run's prompts depend on, tokenizer included, into `renderer/`, once.

        Returns the renderer to go on with: a run that goes on another day tells templates the date that it began on.
        """
        from stepgym.model.renderer_files import recorded_date, redated, save_renderer

        day = recorded_date(save_renderer(renderer, self.path / "renderer"))
        return renderer if renderer.template.today == day else redated(renderer, day)

    @property
    def started_at(self) -> float:
        """Unix time in seconds when the run was first started."""
        return float(json.loads((self.path / "run.json").read_text())["started_at"])

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_jsonable(row), allow_nan=True) + "\n")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The rows of `metrics.jsonl`; a last line that was cut off by a kill is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def keep_metrics(self, wanted: Any) -> None:
        """Rewrite `metrics.jsonl` with only the rows that are `wanted`: what a resumed run will do again goes."""
        rows = [row for row in self.metrics() if wanted(row)]
        write_whole(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_whole(self.path / "summary.json", json.dumps(to_jsonable(summary), indent=2) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` holds; None before the run has ended."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.close()

    def _has_results(self) -> bool:
        kept = (self.trajectories, self.checkpoints)
        return any((self.path / name).exists() for name in ("metrics.jsonl", "summary.json")) or any(
            not entry.name.startswith(".") for folder in kept if folder.is_dir() for entry in folder.iterdir()
        )

    def _take_lock(self) -> TextIOWrapper:
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(f"{self.path}: another process is working on this run") from None
        return lock


def _is_leftover(entry: Path) -> bool:
    """Whether a run that was killed while it made its folder may have left this there."""
    return entry.name == ".lock" or entry.name.startswith(".run.json.")


def _digest_in(identity: Path) -> str:
    try:
        return str(json.loads(identity.read_text(encoding="utf-8"))["digest"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{identity}: not the identity of a run; give another --out") from None


@contextmanager
def run_folder(path: str | os.PathLike[str], *, config: Mapping[str, Any], digest: str) -> Iterator[RunFolder]:
    """A `RunFolder` that is closed at the end of the block."""
    folder = RunFolder(path, config=config, digest=digest)
    try:
        yield folder
    finally:
        folder.close()


def default_path(name: str, seed: int) -> Path:
    """`runs/{name}/{time}-{seed}`, relative to the working directory."""
    return Path("runs") / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader, or a kill, never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_yaml(path: Path, content: Any) -> None:
    from io import StringIO

    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = False
    text = StringIO()
    yaml.dump(content, text)
    write_whole(path, text.getvalue())
