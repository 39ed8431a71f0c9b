from __future__ import annotations

import numpy as np
import pytest

from stepgym.errors import UserError
from stepgym.record.merge import MergeReport, merge_steps
from stepgym.record.step import Step


def conversation(start: int, turns: int, **fields) -> list[Step]:
    """Turns of three sampled and two observed tokens, each extending the one before; token ids tell turns apart."""
    steps, history = [], [start, start + 1]
    for turn in range(turns):
        response = [start + 100 * turn + k for k in (10, 11, 12)]
        logprobs = [-0.1 * (turn + 1)] * 3
        steps.append(Step(**{"prompt_ids": history, "response_ids": response, "logprobs": logprobs, **fields}))
        history = [*history, *response, start + 100 * turn + 20, start + 100 * turn + 21]
    return steps


def test_turns_that_extend_each_other_become_one_sequence():
    steps = [
        Step(prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-0.5, -0.25], reward=0.5, metrics={"s": 1.0}),
        Step(prompt_ids=[1, 2, 3, 4, 5, 6], response_ids=[7], logprobs=[-1.0], reward=2.0, loss_mask=[0]),
    ]
    (sequence,), report = merge_steps(steps)
    assert sequence.prompt_ids.tolist() == [1, 2]
    assert sequence.response_ids.tolist() == [3, 4, 5, 6, 7]
    assert sequence.loss_mask.tolist() == [1, 1, 0, 0, 0]
    assert sequence.logprobs.tolist() == [-0.5, -0.25, 0, 0, -1.0]
    assert sequence.rewards.tolist() == [0, 0.5, 0, 0, 2.0]
    assert sequence.step_index.tolist() == [0, 0, -1, -1, 1]
    assert sequence.steps == (0, 1)
    assert sequence.step_rewards.tolist() == [0.5, 2.0]
    assert sequence.metrics == ({"s": 1.0}, {})
    assert (sequence.reward, sequence.length) == (2.5, 7)
    dtypes = [a.dtype.name for a in (sequence.response_ids, sequence.loss_mask, sequence.logprobs, sequence.rewards)]
    assert dtypes == ["int32", "int8", "float32", "float32"]
    assert report == MergeReport(steps=2, sequences=1, tokens_before=11, tokens_after=7, mismatches={})
    assert report.merge_ratio == pytest.approx(11 / 7)


def test_interleaved_agents_merge_each_with_its_own():
    left, right = conversation(1000, 3), conversation(5000, 3)
    in_turns = [step for pair in zip(left, right, strict=True) for step in pair]
    sequences, report = merge_steps(in_turns)
    assert [s.steps for s in sequences] == [(0, 2, 4), (1, 3, 5)]
    one_after_the_other, _ = merge_steps([*left, *right])
    for a, b in zip(sequences, one_after_the_other, strict=True):
        assert a.full_ids.tolist() == b.full_ids.tolist()
    assert (report.sequences, dict(report.mismatches), report.conversations) == (2, {}, 2)


def test_sub_agents_with_the_same_system_prompt_are_no_mismatch_when_rendered_first():
    parent = conversation(0, 2)
    child = [
        Step(prompt_ids=[0, 77], response_ids=[78], logprobs=[-1], rendering="first"),
        Step(prompt_ids=[0, 77, 78, 79], response_ids=[80], logprobs=[-1], rendering="extended"),
    ]
    sequences, report = merge_steps([parent[0], *child, parent[1]])
    assert [s.steps for s in sequences] == [(0, 3), (1, 2)]
    assert (report.conversations, report.mismatches) == (2, {})


def test_an_open_turn_is_one_sequence_and_begins_another_where_it_is_reopened():
    steps = [
        Step(prompt_ids=[1, 2], response_ids=[3, 4], rendering="first"),
        Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6, 9], rendering="continued"),
        Step(prompt_ids=[1, 2, 3, 4, 5, 6, 7], response_ids=[8], rendering="turn_reopened"),  # without the 9
        Step(prompt_ids=[1, 2, 3, 4, 5, 6, 7, 8, 5], response_ids=[3], rendering="continued"),
        Step(prompt_ids=[1, 2, 3, 4, 7], response_ids=[3], rendering="continued"),
    ]
    sequences, report = merge_steps(steps)
    assert [s.steps for s in sequences] == [(0, 1), (2, 3), (4,)]
    assert report.mismatches == {"turn_reopened": 1, "branched": 1}


@pytest.mark.parametrize("broken_share", [0.05, 0.2, 1.0])
def test_a_turn_that_does_not_round_trip_starts_a_sequence_of_its_own(broken_share):
    """The drift of re-tokenised history: one wrong token in the history of a turn breaks exactly that turn."""
    rng = np.random.default_rng(0)
    sequences = breaks = 0
    for _ in range(64):
        steps, history = [], [1, 2, 3]
        for turn in range(8):
            if turn and rng.random() < broken_share:
                breaks += 1
                history = [*history[:-4], 10_000 + breaks, *history[-3:]]
            response = rng.integers(10, 9000, 5).tolist()
            steps.append(Step(prompt_ids=history, response_ids=response))
            history = [*history, *response, 4, 5]
        merged, report = merge_steps(steps)
        sequences += len(merged)
        assert report.mismatches.get("prefix_mismatch", 0) == len(merged) - 1
    assert sequences == 64 + breaks
    assert breaks > 0
    assert broken_share < 1 or sequences == 512


@pytest.mark.parametrize(
    "reason", ["template_rewrote_history", "thinking_stripped", "agent_rewrote_history", "truncated_turn"]
)
def test_the_renderers_reason_is_reported(reason):
    first = Step(prompt_ids=[1, 2], response_ids=[3, 4], rendering="first")
    anew = Step(prompt_ids=[1, 2, 4, 5], response_ids=[6], rendering=reason)
    more = Step(prompt_ids=[1, 2, 4, 5, 6, 7], response_ids=[8], rendering="extended")
    sequences, report = merge_steps([first, anew, more])
    assert [s.steps for s in sequences] == [(0,), (1, 2)]
    assert report.mismatches == {reason: 1}


def test_a_prompt_rendered_anew_that_comes_out_the_same_still_merges():
    first = Step(prompt_ids=[1, 2], response_ids=[3], rendering="first")
    anew = Step(prompt_ids=[1, 2, 3, 4], response_ids=[5], rendering="template_rewrote_history")
    sequences, report = merge_steps([first, anew])
    assert (len(sequences), report.mismatches) == (1, {})


def test_two_turns_from_one_point_branch():
    root = Step(prompt_ids=[1], response_ids=[2], rendering="first")
    left = Step(prompt_ids=[1, 2, 3], response_ids=[4], rendering="extended")
    right = Step(prompt_ids=[1, 2, 5], response_ids=[6], rendering="extended")
    again = Step(prompt_ids=[1], response_ids=[9])
    sequences, report = merge_steps([root, left, right, again])
    assert [s.steps for s in sequences] == [(0, 1), (2,), (3,)]
    assert report.mismatches == {"branched": 2}


def test_absent_and_empty_logprobs_are_different_things():
    absent = [Step(prompt_ids=[1], response_ids=[2]), Step(prompt_ids=[1, 2, 3], response_ids=[4])]
    (sequence,), _ = merge_steps(absent)
    assert sequence.logprobs is None

    empty = [Step(prompt_ids=[1], response_ids=[], logprobs=[]), Step(prompt_ids=[1, 2], response_ids=[], logprobs=[])]
    (sequence,), _ = merge_steps(empty)
    assert sequence.logprobs.tolist() == [0.0]
    assert sequence.loss_mask.tolist() == [0]

    (sequence,), _ = merge_steps(empty[:1])
    assert sequence.logprobs is not None
    assert sequence.logprobs.shape == (0,)

    mixed = [absent[0], Step(prompt_ids=[1, 2, 3], response_ids=[4], logprobs=[-1])]
    sequences, report = merge_steps(mixed)
    assert [s.logprobs is None for s in sequences] == [True, False]
    assert report.mismatches == {"logprobs_missing": 1}


def test_the_reward_of_an_empty_response_sits_on_a_sampled_token_near_it():
    said = Step(prompt_ids=[1], response_ids=[2, 3], reward=1.0)
    silent = Step(prompt_ids=[1, 2, 3, 4], response_ids=[], reward=0.5)
    (sequence,), _ = merge_steps([said, silent])
    assert sequence.rewards.tolist() == [0, 1.5, 0]

    silent_first = Step(prompt_ids=[1], response_ids=[], reward=0.5)
    said_later = Step(prompt_ids=[1, 2], response_ids=[3, 4], reward=1.0)
    (sequence,), _ = merge_steps([silent_first, said_later])
    assert sequence.rewards.tolist() == [0, 0.5, 1.0]

    (sequence,), _ = merge_steps([silent_first])
    assert sequence.rewards.tolist() == []
    assert (sequence.reward, sequence.step_rewards.tolist()) == (0.5, [0.5])


def test_spans_of_weights_move_with_their_response():
    first = Step(prompt_ids=[1, 2], response_ids=[3, 4], weights_versions=[("8", 0, 1), ("9", 1, 2)])
    second = Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], weights_versions=[("9", 0, 1)])
    (sequence,), _ = merge_steps([first, second])
    assert sequence.weights_versions == (("8", 0, 1), ("9", 1, 2), ("9", 3, 4))


def experts(*rows: int) -> np.ndarray:
    """One layer, two experts per token: [rows, 1, 2]."""
    return np.array([[[row, row + 1 if row >= 0 else -1]] for row in rows], dtype=np.int16)


def test_routed_experts_are_those_of_the_first_step_that_has_them():
    # The last sampled token of a turn was never forwarded (-1); the next turn's prompt pass fills it in.
    first = Step(prompt_ids=[1, 2], response_ids=[3, 4], routed_experts=experts(10, 11, 12, -1))
    second = Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], routed_experts=experts(20, 21, 22, 23, 24, 25))
    (sequence,), _ = merge_steps([first, second])
    assert sequence.routed_experts[:, 0, 0].tolist() == [10, 11, 12, 23, 24, 25]

    # A cached prefix is absent from the second turn; what the first recorded stays, its own response is its own.
    cached = Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], routed_experts=experts(-1, -1, -1, -1, 24, 25))
    (sequence,), _ = merge_steps([first, cached])
    assert sequence.routed_experts[:, 0, 0].tolist() == [10, 11, 12, -1, 24, 25]

    without = Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6])
    (sequence,), _ = merge_steps([first, without])
    assert sequence.routed_experts[:, 0, 0].tolist() == [10, 11, 12, -1, -1, -1]
    (sequence,), _ = merge_steps([Step(prompt_ids=[1], response_ids=[2]), Step(prompt_ids=[1, 2], response_ids=[3])])
    assert sequence.routed_experts is None


def test_routed_experts_of_two_shapes_are_refused():
    one = Step(prompt_ids=[1], response_ids=[2], routed_experts=np.zeros((2, 1, 2)))
    other = Step(prompt_ids=[1, 2], response_ids=[3], routed_experts=np.zeros((3, 2, 2)))
    with pytest.raises(UserError, match="differ in shape"):
        merge_steps([one, other])


def test_steps_without_ids_are_refused():
    with pytest.raises(UserError, match="step 1 has no token ids"):
        merge_steps([Step(prompt_ids=[1], response_ids=[2]), Step(prompt_ids=None, response_ids=None)])


def test_nothing_merges_to_nothing():
    sequences, report = merge_steps([])
    assert sequences == []
    assert (report.sequences, report.merge_ratio, report.mismatches) == (0, 1.0, {})


def test_reports_add_up():
    _, left = merge_steps(conversation(0, 4))
    _, right = merge_steps([Step(prompt_ids=[1, 2], response_ids=[3]), Step(prompt_ids=[1, 9], response_ids=[3])])
    both = left + right + right
    assert (both.steps, both.sequences, both.mismatches) == (8, 5, {"prefix_mismatch": 2})
    assert both.tokens_before == left.tokens_before + 2 * right.tokens_before
    assert both.to_dict()["merge_ratio"] == both.merge_ratio
