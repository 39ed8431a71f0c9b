"""Steps as deltas: what each prompt shares with an earlier step is said once.

The prompt of a turn usually repeats the whole conversation so far. A delta names the earlier step that it repeats
most of (`parent`) and how many tokens of it (`keep`), so that only the new tokens are stored. In memory steps are
whole arrays; deltas are for storage, and reading them back gives exactly the ids that went in (DESIGN 6, promise 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepgym.record.step import Ids, Step


class Delta(NamedTuple):
    """Where the prompt of a step begins to be new.

    Attributes:
        parent: Index of the earlier step whose prompt + response shares the longest prefix with this prompt (the
            latest of several); -1 where no earlier step shares a token.
        keep: Number of tokens shared; the prompt is `full_ids(parent)[:keep]` and then its new tokens.
    """

    parent: int
    keep: int


NO_PARENT = Delta(-1, 0)


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of leading tokens that two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def shared_with_prompt(step: Step, prompt_ids: Ids) -> int:
    """Number of leading tokens of `prompt_ids` that are also the first tokens of the step's prompt + response."""
    if step.prompt_ids is None or step.response_ids is None:
        return 0
    shared = common_prefix(step.prompt_ids, prompt_ids)
    if shared == len(step.prompt_ids):
        shared += common_prefix(step.response_ids, prompt_ids[shared:])
    return shared


def find_deltas(steps: Sequence[Step]) -> list[Delta]:
    """The delta of each step against the steps before it.

    A step that extends the latest one, which is what nearly all do, costs one comparison of its ids. Where one does
    not, all steps are sorted once and parents are read off the sorted order, so the cost stays linear in the ids
    (and quadratic only in the number of steps, by vectorised minima). Steps without ids have no parent and are none.
    """
    deltas: list[Delta] = []
    index: PrefixIndex | None = None
    latest, longest = -1, 0
    for i, step in enumerate(steps):
        if step.prompt_ids is None:
            deltas.append(NO_PARENT)
            continue
        delta = NO_PARENT
        if latest >= 0:
            keep = shared_with_prompt(steps[latest], step.prompt_ids)
            # Nothing can beat the latest step when it shares the whole prompt, or all of the longest step there is.
            if keep and (keep == len(step.prompt_ids) or keep == longest):
                delta = Delta(latest, keep)
            else:
                index = index or PrefixIndex(steps)
                shared = index.shared(i)
                if shared.any():
                    delta = Delta(int(np.flatnonzero(shared == shared.max())[-1]), int(shared.max()))
        deltas.append(delta)
        latest, longest = i, max(longest, step.length)
    return deltas


class PrefixIndex:
    """All steps sorted by their ids, so that the shared prefix of any two is a minimum over neighbours."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._prompt_lengths = [-1 if step.prompt_ids is None else len(step.prompt_ids) for step in steps]
        known = [i for i, step in enumerate(steps) if step.prompt_ids is not None]
        texts = {i: steps[i].full_ids.tobytes() for i in known}
        # Any order that keeps equal prefixes together will do, so bytes are compared as they lie in memory.
        order = sorted(known, key=texts.__getitem__)
        neighbours = [common_prefix(a, b) for a, b in pairwise(np.frombuffer(texts[i], np.int32) for i in order)]
        self._order = np.array(order, dtype=np.int64)
        self._neighbours = np.array(neighbours, dtype=np.int64)
        self._rank = {step: rank for rank, step in enumerate(order)}

    def shared(self, i: int) -> NDArray[np.int64]:
        """Tokens that the prompt of step `i` shares with the prompt + response of each step before it: int64 [i]."""
        result = np.zeros(len(self._prompt_lengths), dtype=np.int64)
        rank = self._rank.get(i)
        if rank is not None:
            below = np.minimum.accumulate(self._neighbours[:rank][::-1])[::-1]
            above = np.minimum.accumulate(self._neighbours[rank:])
            result[self._order[:rank]] = below
            result[self._order[rank + 1 :]] = above
        return np.minimum(result[:i], self._prompt_lengths[i])


def materialise(
    deltas: Sequence[Delta],
    new_ids: Sequence[Ids | None],
    response_ids: Sequence[Ids | None],
) -> list[tuple[Ids | None, Ids | None]]:
    """Prompt and response ids (int32 [P], int32 [R]) of each step, from its delta.

    A chain of steps of which each extends the one before becomes views of one buffer, so it takes the memory of its
    last step. Steps whose `new_ids` and `response_ids` are None stay None.

    Raises:
        ValueError: for a parent that is not an earlier step with ids, or a `keep` beyond the parent's length.
    """
    lengths = _checked_lengths(deltas, new_ids, response_ids)
    continued_by: dict[int, int] = {}
    for i, (parent, keep) in enumerate(deltas):
        if parent >= 0 and keep == lengths[parent]:
            continued_by.setdefault(parent, i)
    full: list[Ids | None] = [None] * len(deltas)
    for head in range(len(deltas)):
        if lengths[head] < 0 or full[head] is not None:
            continue
        chain = [head]
        while chain[-1] in continued_by:
            chain.append(continued_by[chain[-1]])
        buffer = np.empty(lengths[chain[-1]], dtype=np.int32)
        parent, keep = deltas[head]
        if keep:
            source = full[parent]
            assert source is not None  # checked: parents come earlier and have ids
            buffer[:keep] = source[:keep]
        for i in chain:
            new, response = new_ids[i], response_ids[i]
            assert new is not None  # because lengths[i] >= 0
            assert response is not None
            start, end = deltas[i].keep, lengths[i]
            buffer[start : end - len(response)] = new
            buffer[end - len(response) : end] = response
            full[i] = buffer[:end]
    result: list[tuple[Ids | None, Ids | None]] = []
    for ids, response in zip(full, response_ids, strict=True):
        if ids is None or response is None:
            result.append((None, None))
        else:
            split = len(ids) - len(response)
            result.append((ids[:split], ids[split:]))
    return result


def _checked_lengths(
    deltas: Sequence[Delta], new_ids: Sequence[Ids | None], response_ids: Sequence[Ids | None]
) -> list[int]:
    """Length of prompt + response of each step, -1 where there are no ids; the deltas are known to be sound after."""
    lengths: list[int] = []
    for i, ((parent, keep), new, response) in enumerate(zip(deltas, new_ids, response_ids, strict=True)):
        if (new is None) != (response is None):
            raise ValueError(f"step {i}: prompt and response ids are both given or both absent")
        if new is None or response is None:
            lengths.append(-1)
            continue
        if not -1 <= parent < i or keep < 0 or keep > (lengths[parent] if parent >= 0 else 0):
            raise ValueError(f"step {i}: the delta (parent {parent}, keep {keep}) does not fit the steps before it")
        lengths.append(keep + len(new) + len(response))
    return lengths
