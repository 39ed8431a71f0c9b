"""Continuous batching: requests join and leave a running batch between one token and the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.errors import EngineError
from stepgym.model.engines.base import Completion
from stepgym.model.engines.forward import Forward
from stepgym.model.engines.sampler import UniformStream, draw, is_plain
from stepgym.model.engines.slots import WORTH_COPYING, Segment, SlotTable
from stepgym.model.engines.stop_strings import StopStrings
from stepgym.record.step import Ids, Sampling, WeightsSpan

UNIFORMS_AT_ONCE = 64


@dataclass(eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        settle: Called once with the `Completion`, or with the exception that ended the request.
        cancelled: Set by whoever no longer wants the answer; the request leaves at the next token.
    """

    prompt_ids: Ids
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int
    settle: Callable[[Completion | BaseException], None]
    cancelled: bool = False
    submitted_at: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class _Running:
    """A request in a slot."""

    request: Request
    slot: int
    uniforms: UniformStream
    reused: int
    started_at: float
    versions: list[tuple[str, int]]  # (version, from which response token on)


class Batcher:
    """Runs requests, one token of each at a time. Not thread-safe: one thread owns it.

    Args:
        forward: The model.
        tokenizer: Its tokenizer, for stop strings.
        vocab_size: Number of logits.
        slots: Sequences whose keys and values are kept, running or waiting for their next turn.
        max_batch_size: Requests that run at once.
        max_prefill_tokens: Prompt tokens computed in one pass; longer prompts take several.
        context_length: Most tokens in a slot.
        terminators: Ids that end a response.
        reuse: Whether what a finished request computed is kept for prompts that begin alike.
    """

    def __init__(
        self,
        forward: Forward,
        tokenizer: Any,
        *,
        vocab_size: int,
        slots: int,
        max_batch_size: int,
        max_prefill_tokens: int,
        context_length: int,
        terminators: Sequence[int],
        reuse: bool,
        device: torch.device,
    ) -> None:
        self.version = "0"
        self._forward = forward
        self._max_batch_size = min(max_batch_size, slots)
        self._max_prefill_tokens = max_prefill_tokens
        self._context_length = context_length
        self._reuse = reuse
        self._copies = reuse and forward.copies
        self._device = device
        self._vocab_size = vocab_size
        self._terminators = tuple(t for t in terminators if 0 <= t < vocab_size)
        self._stop_strings = StopStrings(tokenizer, vocab_size)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._table = SlotTable(slots)
        # Per slot, so that a token of every request costs a few array operations and no loop over requests.
        self._known = np.zeros(slots, dtype=np.int64)
        self._prompt = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._plain = np.ones(slots, dtype=np.bool_)
        self._uniforms = np.zeros((slots, UNIFORMS_AT_ONCE))
        self._logprobs = np.zeros((slots, self._table.capacity), dtype=np.float32)
        self._ends = np.zeros((1, vocab_size), dtype=np.bool_)
        self._may_end = np.zeros((1, vocab_size), dtype=np.bool_)
        self._stop_rows: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._stop_row = np.zeros(slots, dtype=np.int64)

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self._waiting.append(request)

    def set_version(self, version: str) -> None:
        """New weights are in force from the next token on; nothing computed by the old ones is reused.

        A running request goes on from the tokens that it has: their keys and values are computed again, so that every
        log-probability is that of its token, after all tokens before it, under the very weights that its span names.
        """
        self.version = version
        self._forward.refresh()
        self._table.clear()
        for running in self._running.values():
            running.versions.append((version, int(self._known[running.slot] - self._prompt[running.slot])))

    def fail(self, message: str) -> None:
        """Settle every request with an `EngineError` of that message."""
        for running in list(self._running.values()):
            self._leave(running, keep=False)
            running.request.settle(EngineError(message))
        while self._waiting:
            self._waiting.popleft().settle(EngineError(message))
        self._table.clear()

    def step(self) -> None:
        """One forward pass: some prompt tokens of new requests, one more token of all the others."""
        for running in [r for r in self._running.values() if r.request.cancelled]:
            self._leave(running, keep=True)
        self._admit()
        if not self._running:
            return
        active = np.flatnonzero(self._table.active)
        pending = self._known[active] - self._table.filled[active]
        decoding = active[pending == 1]
        segments, finishing = self._prefill(active[pending > 1])
        positions = self._table.filled[decoding]
        ids = self._table.ids[decoding, positions].astype(np.int64)
        logits = self._forward((decoding, positions, ids), segments, finishing)
        self._table.filled[decoding] += 1
        for segment in segments:
            self._table.filled[segment.slot] += len(segment.ids)
        ready = np.concatenate([decoding, [segments[i].slot for i in finishing]]).astype(np.int64)
        if len(ready):
            self._sample(ready, logits)

    # ---- joining ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests slots, in the order in which they came."""
        if not self._waiting:
            return
        deferred: list[Request] = []
        prefilling = [r.request.prompt_ids for r in self._running.values() if self._pending(r) > 1]
        while self._waiting and len(self._running) < self._max_batch_size:
            request = self._waiting.popleft()
            if request.cancelled:
                continue
            if self._copies and self._soon_shared(request.prompt_ids, prefilling):
                deferred.append(request)
                continue
            running = self._start(request)
            if running is None:
                deferred.append(request)
                break
            if self._pending(running) > 1:
                prefilling.append(request.prompt_ids)
        self._waiting.extendleft(reversed(deferred))

    def _pending(self, running: _Running) -> int:
        return int(self._known[running.slot] - self._table.filled[running.slot])

    def _soon_shared(self, prompt: Ids, prefilling: Sequence[Ids]) -> bool:
        """Whether a prompt being computed now shares more with `prompt` than any slot has computed already.

        The samples of a group have one prompt: it is computed once and copied.
        """
        if not prefilling:
            return False
        needed = self._table.longest_prefix(prompt) + WORTH_COPYING
        if needed >= len(prompt):
            return False
        start = prompt[:needed].tobytes()
        return any(other[:needed].tobytes() == start for other in prefilling)

    def _start(self, request: Request) -> _Running | None:
        prompt = request.prompt_ids
        limit = min(len(prompt) + request.max_tokens, self._context_length)
        self._grow(len(prompt) + 1)
        claim = self._table.claim(prompt, copies=self._copies)
        if claim is None:
            return None
        slot, reused, source = claim
        if source is not None:
            self._forward.copy(source, slot, reused)
        seed = request.seed
        running = _Running(request, slot, UniformStream(seed), reused, time.perf_counter(), [(self.version, 0)])
        self._running[slot] = running
        self._known[slot] = self._prompt[slot] = len(prompt)
        self._limit[slot] = limit
        self._temperature[slot] = request.sampling.temperature
        self._plain[slot] = is_plain(request.sampling)
        self._stop_row[slot] = self._stops(request.stop, request.stop_token_ids)
        return running

    def _stops(self, stop: tuple[str, ...], stop_token_ids: tuple[int, ...]) -> int:
        """Row of the tables that say which tokens end, or may end, a response with these stops."""
        key = (stop, stop_token_ids)
        row = self._stop_rows.get(key)
        if row is None:
            ends = np.zeros(self._vocab_size, dtype=np.bool_)
            ends[[t for t in (*self._terminators, *stop_token_ids) if 0 <= t < self._vocab_size]] = True
            row = self._stop_rows[key] = len(self._stop_rows)
            if row == len(self._ends):
                grow = [(0, len(self._ends)), (0, 0)]
                self._ends, self._may_end = np.pad(self._ends, grow), np.pad(self._may_end, grow)
            self._ends[row] = ends
            self._may_end[row] = self._stop_strings.may_complete(stop)
        return row

    def _grow(self, needed: int) -> None:
        capacity = self._table.capacity
        if needed <= capacity:
            return
        capacity = max(needed, min(2 * capacity, max(needed, self._context_length)))
        self._forward.grow(capacity, self._table.filled.tolist())
        self._table.grow(capacity)
        self._logprobs = np.pad(self._logprobs, [(0, 0), (0, capacity - self._logprobs.shape[1])])

    # ---- one pass -----------------------------------------------------------------------------------------------

    def _prefill(self, slots: NDArray[np.int64]) -> tuple[list[Segment], list[int]]:
        """The prompt tokens to compute in this pass, and which segments are the end of their prompt."""
        budget = self._max_prefill_tokens
        segments: list[Segment] = []
        finishing: list[int] = []
        for slot in slots.tolist():
            if budget == 0:
                break
            start, end = int(self._table.filled[slot]), int(self._known[slot])
            count = min(end - start, budget)
            budget -= count
            if start + count == end:
                finishing.append(len(segments))
            segments.append(Segment(slot, start, self._table.ids[slot, start : start + count]))
        return segments, finishing

    def _sample(self, slots: NDArray[np.int64], logits: torch.Tensor) -> None:
        """Draw a token for each slot, and settle the requests that it ends."""
        count = self._known[slots] - self._prompt[slots]
        column = count % UNIFORMS_AT_ONCE
        for slot in slots[column == 0].tolist():
            self._uniforms[slot] = self._running[slot].uniforms.next(UNIFORMS_AT_ONCE)
        special = [
            (row, self._running[slot].request.sampling, self._running[slot].request.prompt_ids, self._response(slot))
            for row, slot in enumerate(slots.tolist())
            if not self._plain[slot]
        ]
        drawn, drawn_logprobs = draw(
            logits,
            torch.from_numpy(self._temperature[slots]).to(self._device),
            torch.from_numpy(self._uniforms[slots, column]).to(self._device),
            special,
        )
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        self._grow(int(self._known[slots].max()) + 1)
        self._table.ids[slots, self._known[slots]] = tokens
        self._logprobs[slots, self._known[slots]] = logprobs
        self._known[slots] += 1
        broken = ~np.isfinite(logprobs)
        ended = self._ends[self._stop_row[slots], tokens] & ~broken
        perhaps = self._may_end[self._stop_row[slots], tokens] & ~ended
        for row in np.flatnonzero(perhaps).tolist():
            slot = int(slots[row])
            ended[row] = self._stop_strings.completed(self._response(slot), self._running[slot].request.stop)
        full = self._known[slots] >= self._limit[slots]
        for row in np.flatnonzero(ended | full | broken).tolist():
            running = self._running[int(slots[row])]
            if broken[row]:
                self._leave(running, keep=False)
                running.request.settle(EngineError("the model gave logits that are not numbers"))
            else:
                self._finish(running, "stop" if ended[row] else "length")

    def _response(self, slot: int) -> Ids:
        return self._table.ids[slot, self._prompt[slot] : self._known[slot]]

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _finish(self, running: _Running, reason: str) -> None:
        slot = running.slot
        start, end = int(self._prompt[slot]), int(self._known[slot])
        now = time.perf_counter()
        completion = Completion(
            response_ids=self._table.ids[slot, start:end].copy(),
            logprobs=self._logprobs[slot, start:end].copy(),
            finish_reason=reason,
            weights_versions=_spans(running.versions, end - start),
            metrics={
                "queue_s": running.started_at - running.request.submitted_at,
                "generate_s": now - running.started_at,
                "reused_tokens": float(running.reused),
            },
        )
        self._leave(running, keep=True)
        running.request.settle(completion)

    def _leave(self, running: _Running, *, keep: bool) -> None:
        del self._running[running.slot]
        self._table.release(running.slot, keep=keep and self._reuse)


def _spans(versions: Sequence[tuple[str, int]], length: int) -> list[WeightsSpan]:
    """Spans (version, start, end) without empty ones."""
    ends = [start for _, start in versions[1:]] + [length]
    return [(version, start, end) for (version, start), end in zip(versions, ends, strict=True) if start < end]
