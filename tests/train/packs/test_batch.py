from __future__ import annotations

import numpy as np
import pytest

from stepgym.errors import UserError
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.packs.batch import make_batch
from stepgym.train.packs.occurrences import comparable_logprobs


def of(*steps: Step, sample: int = 0) -> Trajectory:
    return Trajectory(id=TrajectoryId("train", 0, "a", sample), outcome=Outcome.COMPLETED, steps=steps, reward=1.0)


def test_each_step_is_a_path_up_to_its_last_trained_token() -> None:
    first = Step(prompt_ids=[1, 2], response_ids=[3, 4], loss_mask=[1, 0], logprobs=[-0.5, -0.6], sampling=Sampling())
    second = Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], logprobs=[-0.7], sampling=Sampling(temperature=0.5))
    batch = make_batch([[of(first, second)]])
    one, two = batch.paths
    assert (one.ids.tolist(), one.position.tolist(), one.target.tolist(), one.token) == ([1, 2], [2], [3], 0)
    assert (two.ids.tolist(), two.position.tolist(), two.target.tolist(), two.token) == ([1, 2, 3, 4, 5], [5], [6], 1)
    assert one.chain == two.chain
    assert batch.tokens.step.tolist() == [0, 1]
    assert batch.tokens.temperature.tolist() == [1.0, 0.5]
    assert batch.tokens.sampler_logprob == pytest.approx([-0.5, -0.7])
    assert (batch.steps, batch.sequences, batch.step_tokens, batch.unique_tokens) == (2, 1, 10, 5)


def test_interleaved_conversations_are_chains_of_their_own() -> None:
    steps = [
        Step(prompt_ids=[1], response_ids=[2]),
        Step(prompt_ids=[9], response_ids=[8]),
        Step(prompt_ids=[1, 2, 3], response_ids=[4]),
        Step(prompt_ids=[9, 8, 7], response_ids=[6]),
    ]
    batch = make_batch([[of(*steps)], [of(*steps)]])
    assert [path.chain for path in batch.paths] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert batch.sequences == 4


def test_units_are_numbered_over_the_batch_and_empty_steps_count() -> None:
    empty = Step(prompt_ids=[1], response_ids=[])
    plain = Step(prompt_ids=[1], response_ids=[2, 3])
    batch = make_batch([[of(empty), of(plain, sample=1)], [of(empty, plain, sample=2)]])
    # The third trajectory's steps merge, and what has no trained token is read by nobody.
    assert (batch.steps, batch.sequences, batch.step_tokens) == (4, 3, 3 + 3)
    assert batch.tokens.step.tolist() == [1, 1, 3, 3]
    assert batch.tokens.trajectory.tolist() == [1, 1, 2, 2]
    assert batch.tokens.group.tolist() == [0, 0, 1, 1]
    assert len(batch.paths) == 2


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(UserError, match=r"trajectory train/0/a/0/0, step 0: it has no token ids"):
        make_batch([[of(Step(prompt_ids=None, response_ids=None))]])
    with pytest.raises(UserError, match=r"step 0: the prompt is empty"):
        make_batch([[of(Step(prompt_ids=[], response_ids=[1]))]])
    unmasked = Step(prompt_ids=[], response_ids=[1, 2], loss_mask=[0, 1])
    assert make_batch([[of(unmasked)]]).paths[0].position.tolist() == [1]


def test_an_empty_batch_is_a_batch() -> None:
    batch = make_batch([])
    assert (len(batch.tokens), list(batch.paths), batch.unique_tokens) == (0, [], 0)


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


def test_a_token_of_probability_zero_is_not_trained() -> None:
    step = Step(prompt_ids=[1, 2], response_ids=[3, 4, 5], logprobs=[-0.5, -np.inf, -0.7], sampling=Sampling())
    batch = make_batch([[of(step)]])
    (path,) = batch.paths
    assert path.position.tolist() == [2, 4]
    assert batch.tokens.sampler_logprob == pytest.approx([-0.5, -0.7])
