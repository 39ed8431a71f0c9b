from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.delta import Delta, common_prefix, find_deltas, materialise
from stepgym.record.step import Step


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    """Steps that extend, cut short, repeat or ignore earlier ones, over few tokens so that prefixes often coincide."""
    tokens = st.lists(st.integers(0, 2), max_size=4)
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 10))):
        if draw(st.booleans()) and draw(st.booleans()):
            steps.append(Step(prompt_ids=None, response_ids=None))
            continue
        earlier = [step.full_ids.tolist() for step in steps if step.prompt_ids is not None]
        base = draw(st.sampled_from([[], *earlier]))
        cut = draw(st.sampled_from([len(base), len(base), len(base) // 2]))
        steps.append(Step(prompt_ids=base[:cut] + draw(tokens), response_ids=draw(tokens)))
    return steps


def brute_force_delta(steps: list[Step], i: int) -> Delta:
    best = Delta(-1, 0)
    prompt = steps[i].prompt_ids
    if prompt is None:
        return best
    for j in range(i):
        if steps[j].prompt_ids is None:
            continue
        keep = 0
        for left, right in zip(steps[j].full_ids, prompt, strict=False):
            if left != right:
                break
            keep += 1
        if keep and keep >= best.keep:
            best = Delta(j, keep)
    return best


def test_common_prefix():
    ids = np.array([1, 2, 3], dtype=np.int32)
    assert common_prefix(ids, ids) == 3
    assert common_prefix(ids, ids[:2]) == 2
    assert common_prefix(ids, np.array([1, 9, 3], dtype=np.int32)) == 1
    assert common_prefix(ids, ids[:0]) == 0


@settings(deadline=None)
@given(step_lists())
def test_the_parent_is_the_latest_of_those_that_share_most(steps):
    assert find_deltas(steps) == [brute_force_delta(steps, i) for i in range(len(steps))]


def test_a_shorter_step_in_between_does_not_hide_a_longer_match():
    long = Step(prompt_ids=[1], response_ids=[2, 3])
    short = Step(prompt_ids=[1], response_ids=[2])
    last = Step(prompt_ids=[1, 2, 3, 4], response_ids=[5])
    assert find_deltas([long, short, last])[2] == Delta(0, 3)


def test_a_chain_of_steps_shares_one_buffer():
    chain, history = [], list(range(5))
    for turn in range(100):
        chain.append(Step(prompt_ids=history, response_ids=[turn, turn + 1, turn + 2]))
        history = [*history, turn, turn + 1, turn + 2, 7]
    deltas = find_deltas(chain)
    new_ids = [step.prompt_ids[delta.keep :] for step, delta in zip(chain, deltas, strict=True)]
    arrays = materialise(deltas, new_ids, [step.response_ids for step in chain])
    start = arrays[0][0].__array_interface__["data"][0]
    for step, (prompt_ids, response_ids) in zip(chain, arrays, strict=True):
        assert prompt_ids.tolist() == step.prompt_ids.tolist()
        assert response_ids.tolist() == step.response_ids.tolist()
        assert prompt_ids.__array_interface__["data"][0] == start
        assert response_ids.__array_interface__["data"][0] == start + prompt_ids.nbytes


@pytest.mark.parametrize("delta", [Delta(1, 1), Delta(0, 4), Delta(0, -1), Delta(-1, 2), Delta(-2, 0)])
def test_a_delta_that_does_not_fit_is_refused(delta):
    ids = np.array([1], dtype=np.int32)
    with pytest.raises(ValueError, match="step 1"):
        materialise([Delta(-1, 0), delta], [ids, ids], [ids, ids])


def test_ids_on_one_side_only_are_refused():
    with pytest.raises(ValueError, match="step 0"):
        materialise([Delta(-1, 0)], [None], [np.array([1], dtype=np.int32)])
