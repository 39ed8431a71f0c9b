from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stepgym.record.step import Step


def test_types_and_defaults():
    step = Step(prompt_ids=[1, 2], response_ids=[3], logprobs=[-1.0])
    assert [a.dtype.name for a in (step.prompt_ids, step.response_ids, step.loss_mask, step.logprobs)] == [
        "int32",
        "int32",
        "int8",
        "float32",
    ]
    assert step.loss_mask.tolist() == [1]
    assert (step.length, step.full_ids.tolist()) == (3, [1, 2, 3])


def test_a_step_cannot_be_changed():
    step = Step(prompt_ids=[1], response_ids=[2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.reward = 1.0
    with pytest.raises(ValueError, match="read-only"):
        step.prompt_ids[0] = 9
    assert dataclasses.replace(step, reward=1.0).reward == 1.0


def test_arrays_that_fit_are_shared_and_stay_writable_to_their_owner():
    buffer = np.arange(5, dtype=np.int32)
    step = Step(prompt_ids=buffer[:3], response_ids=buffer[3:])
    assert np.shares_memory(step.prompt_ids, buffer)
    buffer[0] = 7
    assert step.prompt_ids[0] == 7


def test_none_and_empty_are_different_things():
    assert Step(prompt_ids=[1], response_ids=[]).logprobs is None
    assert Step(prompt_ids=[1], response_ids=[], logprobs=[]).logprobs.shape == (0,)
    without_ids = Step(prompt_ids=None, response_ids=None)
    assert (without_ids.loss_mask, without_ids.length) == (None, 0)
    with pytest.raises(ValueError, match="speaks only chat"):
        _ = without_ids.full_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_ids": None}, "both given or both None"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 entries for 1 response tokens"),
        ({"logprobs": []}, "logprobs has 0 entries"),
        ({"routed_experts": np.zeros((2, 1, 1))}, "routed_experts has 2 rows for 3 tokens"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Step(**{"prompt_ids": [1, 2], "response_ids": [3], **fields})
