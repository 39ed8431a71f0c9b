from __future__ import annotations

from typing import Any

import pytest
from gymnasium.utils.env_checker import check_space_limit
from gymnasium.utils.passive_env_checker import check_action_space, check_observation_space
from hypothesis import given
from hypothesis import strategies as st

from stepgym.env.messages import user
from stepgym.env.spaces import ConversationSpace, MessageSpace


@given(st.text())
def test_natural_language_is_an_action_and_an_observation(text: str) -> None:
    assert MessageSpace().contains(text)
    assert MessageSpace().contains({"role": "assistant", "content": text})
    assert ConversationSpace().contains([user(text)])


@given(st.integers(0, 2**31))
def test_samples_are_contained_and_follow_the_seed(seed: int) -> None:
    for space in (MessageSpace, ConversationSpace):
        one, two = space(seed=seed), space(seed=seed)
        samples = [one.sample() for _ in range(5)]
        assert samples == [two.sample() for _ in range(5)]
        assert all(one.contains(sample) for sample in samples)
        assert one.from_jsonable(one.to_jsonable(samples)) == samples


@pytest.mark.parametrize("value", [None, 5, ["x"], {"role": "user", "content": "x"}, {"content": 5}])
def test_other_things_are_no_action(value: Any) -> None:
    assert not MessageSpace().contains(value)


@pytest.mark.parametrize("value", [None, "x", {}, ["x"], [{"content": "x"}], [{"role": "robot", "content": "x"}]])
def test_other_things_are_no_observation(value: Any) -> None:
    assert not ConversationSpace().contains(value)


def test_spaces_of_a_kind_are_equal_and_gymnasium_takes_them() -> None:
    assert MessageSpace() == MessageSpace(seed=3)
    assert MessageSpace() != ConversationSpace()
    assert len({MessageSpace(), MessageSpace()}) == 1
    check_action_space(MessageSpace())
    check_observation_space(ConversationSpace())
    check_space_limit(ConversationSpace(), "observation")
