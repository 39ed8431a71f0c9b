"""Heavy things that all environments of one class and config share: opened once per process, closed when the run ends."""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from stepgym.env.worker import run_blocking

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_opened: dict[tuple[type, str], Any] = {}


def get_shared(cls: Any, config: Mapping[str, Any]) -> Any:
    """What `cls.open_shared(**config)` returned, opening it on first use. Safe to call from any thread."""
    key = (cls, json.dumps(config, sort_keys=True, default=str))
    with _lock:
        if key not in _opened:
            opened = cls.open_shared(**config)
            _opened[key] = run_blocking(opened) if inspect.iscoroutine(opened) else opened
        return _opened[key]


def close_shared() -> None:
    """Close everything that was opened. Called when a run ends, and when the process does."""
    with _lock:
        opened = list(_opened.values())
        _opened.clear()
    for resource in opened:
        close = getattr(resource, "close", None)
        if close is None:
            continue
        try:
            closed = close()
            if inspect.iscoroutine(closed):
                run_blocking(closed)
        except Exception:
            logger.exception("closing %r failed", resource)


atexit.register(close_shared)
