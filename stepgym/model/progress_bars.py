"""The progress bars of transformers, which draw on stderr, where the caller's own are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers from drawing on stderr, which is the caller's."""
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging  # its functions carry no types
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
