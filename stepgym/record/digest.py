"""One number for what a set of trajectories says, whatever order it was made in.

Two runs with the same seeds and a deterministic engine have equal digests (DESIGN 6, promise 17). Records are sorted
by id. Left out is what no two runs share: when things happened and how long they took, and tracebacks, which hold
paths and addresses (`outcome` and `outcome_detail` say what went wrong).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.record.json_text import dump_json
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory

_TIME_ENDINGS = ("_s", "_ms", "_us", "_ns", "_seconds", "_at")


def content_digest(trajectories: Iterable[Trajectory]) -> str:
    """SHA-256, in hex, over the content of trajectories: a list of them, or a `TrajectoryStore`.

    Ids, logprobs, rewards, messages and everything else count to the last bit, however they were stored. Metrics
    whose names end in a unit of time (`wall_s`, `tokens_per_s`, `latency_ms`), `started_at` and `error` do not.
    """
    records = sorted((trajectory.id, trajectory_digest(trajectory)) for trajectory in trajectories)
    total = hashlib.sha256()
    for _, digest in records:
        total.update(digest)
    return total.hexdigest()


def trajectory_digest(trajectory: Trajectory) -> bytes:
    """SHA-256 over one trajectory; what counts is as of `content_digest`."""
    digest = hashlib.sha256()
    for part in _trajectory_parts(trajectory):
        # Each part is preceded by its length, so that no two lists of parts run together to the same bytes.
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def _trajectory_parts(trajectory: Trajectory) -> Iterator[bytes]:
    t = trajectory
    yield _json(asdict(t.id))
    yield _json([str(t.outcome), t.outcome_detail, bool(t.final), t.env_id])
    yield _json([_number(t.reward), None if t.success is None else bool(t.success), [float(r) for r in t.reward_range]])
    yield _json([t.reward_parts, t.task, t.tools, t.env_config, t.seeds, _timeless(t.metrics), t.provenance])
    for step in t.steps:
        yield from _step_parts(step)


def _step_parts(step: Step) -> Iterator[bytes]:
    for array in (step.prompt_ids, step.response_ids, step.loss_mask, step.logprobs, step.routed_experts):
        yield _array(array)
    yield _json(
        [_number(step.reward), step.reward_parts, step.sampler, step.status, step.finish_reason, step.rendering]
    )
    yield _json([step.new_messages, step.message, None if step.sampling is None else asdict(step.sampling)])
    yield _json([list(step.stop), step.max_tokens, step.follows, step.weights_versions, _timeless(step.metrics)])


def _array(array: NDArray[Any] | None) -> bytes:
    if array is None:
        return b"none"
    return f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith(_TIME_ENDINGS)}


def _json(value: Any) -> bytes:
    return dump_json(value, sort_keys=True).encode()
