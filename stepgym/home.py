"""Where stepgym keeps what it makes once and uses again: environments of vLLM, indexes of corpora."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "STEPGYM_HOME"


def home(*parts: str) -> Path:
    """A folder under `$STEPGYM_HOME`, by default under `~/.cache/stepgym`. It need not exist."""
    given = os.environ.get(HOME_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(given).expanduser() if given else cache / "stepgym").joinpath(*parts)
