"""The records and tiny models of tests/train, for the promises that concern training."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("train_fixtures", Path(__file__).parents[1] / "train" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

make = _module.make
one_thread = _module.one_thread
