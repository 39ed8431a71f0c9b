"""Where the time of a run goes, what memory it takes, and how fast it is: numbers for `metrics.jsonl`."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

GIB = 2**30


class PhaseTimes:
    """Seconds by phase, of the whole run and since the last `lap`. Phases may overlap, and end in any thread.

    Attributes:
        seconds: Seconds by phase so far, in this process.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._lap: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds to a phase."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._lap[name] = self._lap.get(name, 0.0) + seconds

    def begin_lap(self) -> None:
        """Begin the first iteration: what came before is not its time."""
        with self._lock:
            self._started, self._lap = time.perf_counter(), {}

    def lap(self) -> dict[str, float]:
        """`seconds/PHASE` of the phases that ended since the last lap, and `iteration_s`, all of it; begins the next.

        What happens between two laps but after an iteration's metrics are written, its checkpoint say, counts to the
        iteration after.
        """
        with self._lock:
            now = time.perf_counter()
            numbers = {f"seconds/{name}": seconds for name, seconds in sorted(self._lap.items())}
            numbers["iteration_s"] = now - self._started
            self._started, self._lap = now, {}
        return numbers


def memory_metrics(device: torch.device | str = "cpu") -> dict[str, float]:
    """Most memory that this process has taken, in GiB.

    `memory_rss_gib`: resident memory, since the process began. On CUDA also `memory_cuda_gib` (allocated) and
    `memory_cuda_reserved_gib` (held by the allocator), since the last call.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers = {"memory_rss_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}  # macOS counts bytes
    device = torch.device(device)
    if device.type == "cuda":
        numbers["memory_cuda_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        numbers["memory_cuda_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return numbers


def throughput_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second of an iteration, from its other metrics; what cannot be told is left out.

    - `sampled_tokens_per_second`: sampled tokens (of the episodes that stand) per second of the whole iteration;
    - `rollout_tokens_per_second`: the same per second of rollout; where rollouts overlap with updates these seconds are
      those that were waited for them;
    - `update_tokens_per_second`: tokens that were learned from, each step counted whole, per second of update;
    - `forward_tokens_per_second`: tokens that were computed for it, per second of update;
    - `sharing`: tokens that were learned from per token that was computed.
    """
    numbers: dict[str, float] = {}
    sampled = float(row.get("episode_tokens_mean", 0.0)) * float(row.get("episodes", 0.0))
    rollout, update, whole = (
        float(row.get(name, 0.0)) for name in ("seconds/rollout", "seconds/update", "iteration_s")
    )
    steps, forward = float(row.get("tokens_steps", 0.0)), float(row.get("tokens_forward", 0.0))
    if whole > 0 and sampled > 0:
        numbers["sampled_tokens_per_second"] = sampled / whole
    if rollout > 0 and sampled > 0:
        numbers["rollout_tokens_per_second"] = sampled / rollout
    if update > 0 and forward > 0:
        numbers["update_tokens_per_second"] = steps / update
        numbers["forward_tokens_per_second"] = forward / update
    if forward > 0:
        numbers["sharing"] = steps / forward
    return numbers
