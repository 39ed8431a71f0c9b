"""Promise 6: "Merging, then concatenating prompt and response, reproduces the last step's full sequence with no token
twice; tokens between responses have mask 0, reward 0 and logprob 0."
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.merge import merge_steps
from stepgym.record.step import Step

tokens = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    """Turns of conversations that interleave, branch, break, and lack logprobs here and there."""
    steps: list[Step] = []
    with_logprobs = draw(st.booleans())
    for _ in range(draw(st.integers(0, 12))):
        base = draw(st.sampled_from([[], *(step.full_ids.tolist() for step in steps)]))
        if draw(st.integers(0, 3)) == 0:
            base = base[: draw(st.integers(0, len(base)))]
        response = draw(tokens)
        has = with_logprobs if draw(st.integers(0, 9)) else not with_logprobs
        steps.append(
            Step(
                prompt_ids=base + draw(tokens),
                response_ids=response,
                loss_mask=draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response))),
                logprobs=[-1.0 - k for k in range(len(response))] if has else None,
                reward=draw(st.sampled_from([0.0, 0.0, 1.0, -0.5])),
                rendering=draw(st.sampled_from(["", "", "first", "extended", "thinking_stripped"])),
            )
        )
    return steps


def number_of_sequences(steps: list[Step]) -> int:
    """The merge in its plainest form: each step goes after the longest open conversation that it begins with."""
    tails: list[tuple[list[int], int, bool]] = []
    for i, step in enumerate(steps):
        prompt, has = step.prompt_ids.tolist(), step.logprobs is not None
        matching = [tail for tail in tails if prompt[: len(tail[0])] == tail[0] and tail[2] == has]
        if matching:
            tails.remove(max(matching, key=lambda tail: (len(tail[0]), tail[1])))
        tails.append((step.full_ids.tolist(), i, has))
    return len(tails)


@settings(deadline=None)
@given(step_lists())
def test_a_sequence_is_its_last_step_and_nothing_is_lost_or_doubled(steps):
    sequences, report = merge_steps(steps)
    assert sorted(i for s in sequences for i in s.steps) == list(range(len(steps)))
    assert report.sequences == len(sequences) == number_of_sequences(steps)
    assert report.steps == len(steps)
    assert report.tokens_after == sum(s.length for s in sequences)
    assert 0 <= report.conversations <= len(sequences)
    for sequence in sequences:
        assert list(sequence.steps) == sorted(sequence.steps)
        whole = np.concatenate([sequence.prompt_ids, sequence.response_ids]).tolist()
        assert whole == steps[sequence.steps[-1]].full_ids.tolist()
        for i in sequence.steps:
            step = steps[i]
            assert whole[: step.length] == step.full_ids.tolist()
            own = np.flatnonzero(sequence.step_index == i)
            assert (own + len(sequence.prompt_ids)).tolist() == list(range(len(step.prompt_ids), step.length))
            assert sequence.loss_mask[own].tolist() == step.loss_mask.tolist()
            assert (sequence.logprobs is None) == (step.logprobs is None)
            if step.logprobs is not None:
                assert sequence.logprobs[own].tolist() == step.logprobs.tolist()


@settings(deadline=None)
@given(step_lists())
def test_tokens_between_responses_have_mask_reward_and_logprob_zero(steps):
    for sequence in merge_steps(steps)[0]:
        between = sequence.step_index < 0
        assert not sequence.loss_mask[between].any()
        assert not sequence.rewards[between].any()
        if sequence.logprobs is not None:
            assert not sequence.logprobs[between].any()


@settings(deadline=None)
@given(step_lists())
def test_rewards_keep_their_sum(steps):
    sequences, _ = merge_steps(steps)
    assert sum(s.reward for s in sequences) == pytest.approx(sum(step.reward for step in steps))
    for sequence in sequences:
        assert sequence.step_rewards.tolist() == [steps[i].reward for i in sequence.steps]
        if (sequence.step_index >= 0).any():
            assert sequence.rewards.sum() == pytest.approx(sequence.reward)
        for i in sequence.steps:
            own = np.flatnonzero(sequence.step_index == i)
            assert not sequence.rewards[own[1:-1]].any()
