from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.model.lengths import MICRO_BATCH_COST, cut_by_length
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.batch import comparable_logprobs, make_batch, micro_batches


def of(*steps: Step, sample: int = 0) -> Trajectory:
    return Trajectory(id=TrajectoryId("train", 0, "a", sample), outcome=Outcome.COMPLETED, steps=steps, reward=1.0)


def test_a_conversation_becomes_one_row_with_each_trained_token_in_its_place() -> None:
    first = Step(prompt_ids=[1, 2], response_ids=[3, 4], loss_mask=[1, 0], logprobs=[-0.5, -0.6], sampling=Sampling())
    second = Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], logprobs=[-0.7], sampling=Sampling(temperature=0.5))
    batch = make_batch([[of(first, second)]])
    (row,) = batch.rows
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.position.tolist() == [2, 5]
    assert row.token.tolist() == [0, 1]
    assert batch.tokens.step.tolist() == [0, 1]
    assert batch.tokens.temperature.tolist() == [1.0, 0.5]
    assert batch.tokens.sampler_logprob == pytest.approx([-0.5, -0.7])
    assert (batch.steps, batch.row_tokens, batch.step_tokens) == (2, 6, 10)


def test_interleaved_conversations_merge_each_with_its_own() -> None:
    steps = [
        Step(prompt_ids=[1], response_ids=[2]),
        Step(prompt_ids=[9], response_ids=[8]),
        Step(prompt_ids=[1, 2, 3], response_ids=[4]),
        Step(prompt_ids=[9, 8, 7], response_ids=[6]),
    ]
    batch = make_batch([[of(*steps)]])
    assert [row.ids.tolist() for row in batch.rows] == [[1, 2, 3, 4], [9, 8, 7, 6]]
    assert [row.token.tolist() for row in batch.rows] == [[0, 2], [1, 3]]


def test_units_are_numbered_over_the_batch_and_empty_steps_count() -> None:
    empty = Step(prompt_ids=[1], response_ids=[])
    plain = Step(prompt_ids=[1], response_ids=[2, 3])
    batch = make_batch([[of(empty), of(plain, sample=1)], [of(empty, plain, sample=2)]], rows="steps")
    assert batch.steps == 4
    assert batch.tokens.step.tolist() == [1, 1, 3, 3]
    assert batch.tokens.trajectory.tolist() == [1, 1, 2, 2]
    assert batch.tokens.group.tolist() == [0, 0, 1, 1]
    assert len(batch.rows) == 2


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(UserError, match=r"trajectory train/0/a/0/0, step 0: it has no token ids"):
        make_batch([[of(Step(prompt_ids=None, response_ids=None))]])
    with pytest.raises(UserError, match=r"step 0: the prompt is empty"):
        make_batch([[of(Step(prompt_ids=[], response_ids=[1]))]])
    unmasked = Step(prompt_ids=[], response_ids=[1, 2], loss_mask=[0, 1])
    assert make_batch([[of(unmasked)]]).rows[0].position.tolist() == [1]


def test_an_empty_batch_is_a_batch() -> None:
    batch = make_batch([])
    assert (len(batch.tokens), list(batch.rows), list(micro_batches(batch, 100))) == (0, [], [])


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": None},
        {"sampler": "scripted"},
        {"sampling": None},
        {"sampling": Sampling(logprobs_kind="raw")},
        {"sampling": Sampling(temperature=0.0)},
    ],
)
def test_logprobs_that_mean_something_else_are_not_compared(change: dict[str, object]) -> None:
    fields = {"prompt_ids": [1], "response_ids": [2], "logprobs": [-1.0], "sampling": Sampling()}
    assert comparable_logprobs(Step(**fields)).tolist() == [-1.0]
    assert np.isnan(comparable_logprobs(Step(**{**fields, **change}))).all()


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 1000))
def test_cuts_cover_everything_once_keep_to_the_budget_and_cost_no_more_than_greedy(
    lengths: list[int], budget: int
) -> None:
    falling = np.array(sorted(lengths, reverse=True), dtype=np.int64)
    ranges = cut_by_length(falling, budget)
    assert [i for start, end in ranges for i in range(start, end)] == list(range(len(lengths)))
    cost = 0
    for start, end in ranges:
        assert end - start == 1 or falling[start] * (end - start) <= budget
        cost += falling[start] * (end - start) + MICRO_BATCH_COST
    greedy, start = 0, 0
    while start < len(falling):
        size = min(len(falling) - start, max(1, budget // int(falling[start])))
        greedy += int(falling[start]) * size + MICRO_BATCH_COST
        start += size
    assert cost <= greedy


def test_micro_batches_hold_each_trained_token_once_with_its_target_and_predictor(make: SimpleNamespace) -> None:
    made = [make.group(1, [1, 0, 1]), make.group(2, [0, 1], task="b", breaks=(1,), temperature=0.5)]
    batch = make_batch(made)
    said = np.concatenate([step.response_ids for group in made for t in group for step in t.steps])
    found, sharpened = {}, 0
    for micro_batch in micro_batches(batch, 70, pad_id=3):
        flat = micro_batch.ids.reshape(-1)
        assert torch.equal(flat[micro_batch.place + 1], micro_batch.target)
        found.update(zip(micro_batch.token.tolist(), micro_batch.target.tolist(), strict=True))
        expected = torch.from_numpy(batch.tokens.temperature)[micro_batch.token]
        if micro_batch.temperature is None:
            assert (expected == 1).all()
        else:
            assert torch.equal(micro_batch.temperature, expected)
            sharpened += int((expected != 1).sum())
    assert sharpened == (batch.tokens.temperature != 1).sum() > 0
    assert [found[i] for i in range(len(found))] == said.tolist()


def test_a_token_of_probability_zero_is_not_trained() -> None:
    step = Step(prompt_ids=[1, 2], response_ids=[3, 4, 5], logprobs=[-0.5, -np.inf, -0.7], sampling=Sampling())
    batch = make_batch([[of(step)]])
    (row,) = batch.rows
    assert row.position.tolist() == [2, 4]
    assert batch.tokens.sampler_logprob == pytest.approx([-0.5, -0.7])
