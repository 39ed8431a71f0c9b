"""The global random generators of torch, numpy and Python, as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """State of the generators: of torch on the CPU and on this process's GPU, of numpy, of Python."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = numpy_state
    version, internal, following = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": [str(name), int(position), int(has_gauss), float(gauss)],
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_rest": [version, following],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back where `random_state` was called. That of a GPU only where there is one now."""
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    name, position, has_gauss, gauss = state["numpy_rest"]
    np.random.set_state((name, state["numpy"].cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    version, following = state["python_rest"]
    random.setstate((version, tuple(state["python"].tolist()), following))
