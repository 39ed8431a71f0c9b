"""Heavy things that all environments of one class and config share: opened once per process, closed with the run."""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from stepgym.env.worker import run_blocking

logger = logging.getLogger(__name__)


class _Slot:
    """One thing to share, and the lock under which it is opened: opening one never waits for another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened = False
        self.resource: Any = None


_lock = threading.Lock()
_slots: dict[tuple[type, str], _Slot] = {}
_inherited: list[dict[tuple[type, str], _Slot]] = []


def get_shared(cls: Any, config: Mapping[str, Any]) -> Any:
    """What `cls.open_shared(**config)` returned, opening it on first use. Safe to call from any thread."""
    key = (cls, json.dumps(config, sort_keys=True, default=str))
    with _lock:
        slot = _slots.setdefault(key, _Slot())
    with slot.lock:
        if not slot.opened:
            resource = cls.open_shared(**config)
            slot.resource = run_blocking(resource) if inspect.iscoroutine(resource) else resource
            slot.opened = True
        return slot.resource


def close_shared(cls: type | None = None) -> None:
    """Close everything that was opened, or what was opened for one class. Called when a run or the process ends."""
    with _lock:
        slots = [_slots.pop(key) for key in list(_slots) if cls is None or key[0] is cls]
    for slot in slots:
        with slot.lock:
            resource, slot.resource, slot.opened = slot.resource, None, False
        close = getattr(resource, "close", None)
        if close is None:
            continue
        try:
            closed = close()
            if inspect.iscoroutine(closed):
                run_blocking(closed)
        except Exception:
            logger.exception("closing %r failed", resource)


def _forget() -> None:
    """In a forked process: what is open belongs to the parent, so it is neither used nor closed here."""
    global _lock, _slots
    _lock = threading.Lock()
    _inherited.append(_slots)  # kept alive: a finaliser would close the parent's pipes and files
    _slots = {}


atexit.register(close_shared)
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget)
