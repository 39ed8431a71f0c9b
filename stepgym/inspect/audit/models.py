"""Which model has the weights of which version."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from stepgym.errors import UserError
from stepgym.inspect.recorded_run import RecordedRun

AUTO = "auto"
_CHECKPOINT = re.compile(r"update-(\d{8,})(?:\.(\d+))?")


class ModelOfVersion(NamedTuple):
    """A model's folder or hub name, and the weights version that it is; None compares whatever was recorded."""

    path: str
    version: str | None


def find_models(run: RecordedRun, model: str, version: str | None, recorded: Collection[str]) -> list[ModelOfVersion]:
    """The models that a run's logprobs can be compared with.

    Args:
        run: The run.
        model: A folder or hub name, or `auto` for the run's own: the checkpoint of each version where there is one,
            or the model that its config names.
        version: The version of the weights in `model`; None finds it out from the checkpoint that it belongs to.
        recorded: The versions that sampled anything.

    Raises `UserError` where no model fits any version, or where it is not clear which version the model is.
    """
    if model == AUTO:
        return _own_models(run, version, recorded)
    folder = Path(model).expanduser()
    if version is None and folder.is_dir():
        version = _version_of(folder)
        if version is not None and recorded and version not in recorded:
            raise UserError(f"--model {model}: its weights are version {version}; the run has {_few(recorded)}")
    if version is None and len(recorded) > 1:
        raise UserError(
            f"--model {model}: which of the run's weights are these? Give --weights-version; it has {_few(recorded)}"
        )
    if version is not None and recorded and version not in recorded:
        raise UserError(f"--weights-version {version}: the run has {_few(recorded)}")
    return [ModelOfVersion(model, version)]


def _own_models(run: RecordedRun, version: str | None, recorded: Collection[str]) -> list[ModelOfVersion]:
    found: dict[str, tuple[int, Path]] = {}
    checkpoints = run.path / "checkpoints"
    if checkpoints.is_dir():
        for entry in sorted(checkpoints.iterdir()):
            match = _CHECKPOINT.fullmatch(entry.name)
            if match and (entry / "model" / "config.json").exists():
                name, revision = str(int(match[1])), int(match[2] or 0)
                if found.get(name, (-1, entry))[0] < revision:
                    found[name] = (revision, entry / "model")
    models = [
        ModelOfVersion(str(folder), name)
        for name, (_, folder) in sorted(found.items(), key=lambda item: int(item[0]))
        if name in recorded and version in (None, name)
    ]
    if models:
        return models
    named = run.section("model").get("path")
    if isinstance(named, str) and not found:
        return [ModelOfVersion(named, version)]
    kept = f"it keeps those of {_few(found)}" if found else "it keeps none"
    raise UserError(f"--model auto: the run has no checkpoint of the weights that sampled ({_few(recorded)}); {kept}")


def _version_of(folder: Path) -> str | None:
    """The version of a checkpoint's `model/` folder, or of the checkpoint itself."""
    for place in (folder, folder.parent):
        state = place / "state.json"
        if state.is_file():
            try:
                return str(int(json.loads(state.read_text(encoding="utf-8"))["update"]))
            except (OSError, ValueError, KeyError, TypeError):
                return None
    return None


def _few(versions: Collection[str]) -> str:
    names = sorted(versions, key=lambda name: (len(name), name))
    shown = ", ".join(map(repr, names[:6])) or "none"
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
