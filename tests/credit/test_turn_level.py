"""Estimators with an advantage per turn: returns, rewards, and steps that started from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepgym.credit import CREDITS
from stepgym.credit.group import GroupRewards, assign
from stepgym.record.step import Step


def group_of(*step_rewards: Sequence[float]) -> GroupRewards:
    arrays = [np.array(rewards, dtype=np.float64) for rewards in step_rewards]
    return GroupRewards(np.array([rewards.sum() for rewards in arrays]), arrays)


def lists(advantages: Sequence[np.ndarray]) -> list[list[float]]:
    return [steps.tolist() for steps in advantages]


# ---- turn returns ---------------------------------------------------------------------------------------------------


def test_turn_returns_by_hand() -> None:
    # Returns with gamma 0.5: [1 + 0.5 * 2, 2] = [2, 2] and [0, 0.0]; values 2 and 0, mean 1.
    group = group_of([1.0, 2.0], [0.0, 0.0])
    advantages = CREDITS.get("turn_returns")(group, gamma=0.5, scale_by_std=False)
    assert lists(advantages) == [[1.0, 1.0], [-1.0, -1.0]]
    # gamma 1: returns [3, 2] and [0, 0]; values 2.5 and 0. Leave one out: baselines 0 and 2.5.
    advantages = CREDITS.get("turn_returns")(group, baseline="leave_one_out", scale_by_std=False)
    assert lists(advantages) == [[3.0, 2.0], [-2.5, -2.5]]
    # Standard deviation: mean 1.25; (1.75^2 + 0.75^2) / 2 + 1.25^2 = 3.375, over n - 1 = 1.
    advantages = CREDITS.get("turn_returns")(group)
    assert advantages[0] == pytest.approx(np.array([1.75, 0.75]) / (np.sqrt(3.375) + 1e-6))


def test_turn_returns_count_a_trajectory_without_turns_by_its_reward() -> None:
    group = GroupRewards(np.array([1.0, 0.0]), [np.array([1.0]), np.array([])])
    assert lists(CREDITS.get("turn_returns")(group, scale_by_std=False)) == [[0.5], []]


# ---- step rewards ---------------------------------------------------------------------------------------------------


def test_step_rewards_against_the_group_by_hand() -> None:
    # Means of the trajectories 0.5 and 0, mean 0.25; (0.75^2 + 0.25^2) / 2 + 0.25^2 = 0.375, over n - 1 = 1.
    advantages = assign(CREDITS.get("step_rewards"), group_of([1.0, 0.0], [0.0, 0.0]), {})
    deviation = np.sqrt(0.375) + 1e-6
    assert advantages[0] == pytest.approx(np.array([0.75, -0.25]) / deviation)
    assert advantages[1] == pytest.approx(np.array([-0.25, -0.25]) / deviation)


def test_step_rewards_against_the_same_turn_by_hand() -> None:
    # Turn 1: 1, 0, 5, mean 2, variance (1 + 4 + 9) / 2 = 7. Turn 2: 0 and 2, mean 1, variance 2. Turn 3: alone.
    group = group_of([1.0, 0.0], [0.0, 2.0, -4.0], [5.0])
    advantages = assign(CREDITS.get("step_rewards"), group, {"normalise": "turn"})
    assert advantages[0] == pytest.approx([-1 / 7**0.5, -1 / 2**0.5], abs=1e-5)
    assert advantages[1] == pytest.approx([-2 / 7**0.5, 1 / 2**0.5, 0.0], abs=1e-5)
    assert advantages[2] == pytest.approx([3 / 7**0.5], abs=1e-5)


def test_step_rewards_as_they_are() -> None:
    group = group_of([1.0, -2.0], [0.5])
    advantages = assign(CREDITS.get("step_rewards"), group, {"normalise": "none"})
    assert lists(advantages) == [[1.0, -2.0], [0.5]]
    advantages[0][0] = 7.0
    assert group.step_rewards[0][0] == 1.0
    assert lists(assign(CREDITS.get("step_rewards"), group_of([3.0, 4.0]), {"normalise": "none"})) == [[3.0, 4.0]]


# ---- GiGPO ----------------------------------------------------------------------------------------------------------


def states(group: GroupRewards, names: Sequence[str]) -> GroupRewards:
    """Give each step the state that its letter stands for."""
    steps = [[Step(prompt_ids=[ord(letter)], response_ids=[1]) for letter in name] for name in names]
    return replace(group, steps=steps)


def test_gigpo_by_hand() -> None:
    # Trajectories: rewards 1 and 0, mean 0.5, standard deviation sqrt(0.5): E = 0.707, -0.707.
    # Returns with gamma 0.5: [0.5, 1] and [0, 0]. State a: 0.5 and 0, mean 0.25, deviation sqrt(0.125): 0.707, -0.707.
    # b and c were met once each.
    group = states(group_of([0.0, 1.0], [0.0, 0.0]), ["ab", "ac"])
    episode = 0.5 / (0.5**0.5 + 1e-6)
    step = 0.25 / (0.125**0.5 + 1e-6)
    advantages = assign(CREDITS.get("gigpo"), group, {"gamma": 0.5})
    assert advantages[0] == pytest.approx([episode + step, episode])
    assert advantages[1] == pytest.approx([-episode - step, -episode])
    advantages = assign(CREDITS.get("gigpo"), group, {"gamma": 0.5, "step_weight": 3.0, "scale_by_std": False})
    assert lists(advantages) == [[0.5 + 3 * 0.25, 0.5], [-0.5 - 3 * 0.25, -0.5]]


def test_gigpo_compares_all_visits_of_a_state() -> None:
    # gamma 1, not scaled. Returns: [1, 1, 1], [-1], [0, 0]. State a was met four times: 1, 1, -1, 0, mean 0.25.
    group = states(group_of([0.0, 0.0, 1.0], [-1.0], [0.0, 0.0]), ["aab", "a", "ac"])
    advantages = assign(CREDITS.get("gigpo"), group, {"gamma": 1.0, "scale_by_std": False})
    assert lists(advantages) == [[1 + 0.75, 1 + 0.75, 1.0], [-1 - 1.25], [0 - 0.25, 0.0]]


def test_gigpo_without_weight_or_shared_states_is_grpo() -> None:
    group = group_of([0.0, 1.0], [-0.5], [0.25, 0.0, 0.0])
    expected = lists(assign(CREDITS.get("grpo"), group, {}))
    assert lists(assign(CREDITS.get("gigpo"), states(group, ["ab", "c", "def"]), {})) == expected
    assert lists(assign(CREDITS.get("gigpo"), states(group, ["aa", "a", "aaa"]), {"step_weight": 0.0})) == expected


def test_gigpo_of_one_trajectory_that_goes_in_circles_is_zero() -> None:
    assert lists(assign(CREDITS.get("gigpo"), states(group_of([0.0, 1.0]), ["aa"]), {})) == [[0.0, 0.0]]


def test_gigpo_by_observation() -> None:
    """Other histories and other ids of tool calls, but the same messages came in."""

    def seen(call: str, content: str, prompt: int, said: str) -> Step:
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": said},
            {"role": "tool", "content": content, "tool_call_id": call},
        ]
        return Step(prompt_ids=[prompt], response_ids=[1], new_messages=messages)

    steps = [
        [seen("x", "door", 1, "go"), seen("y", "hall", 2, "on")],
        [seen("z", "door", 3, "try"), seen("w", "", 4, "")],
    ]
    group = replace(group_of([0.0, 1.0], [0.0, 0.0]), steps=steps)
    by_observation = assign(CREDITS.get("gigpo"), group, {"state": "observation", "gamma": 1.0, "scale_by_std": False})
    assert lists(by_observation) == [[0.5 + 0.5, 0.5], [-0.5 - 0.5, -0.5]]
    by_prompt = assign(CREDITS.get("gigpo"), group, {"state": "prompt", "gamma": 1.0, "scale_by_std": False})
    assert lists(by_prompt) == [[0.5, 0.5], [-0.5, -0.5]]


def test_gigpo_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="came without its steps"):
        CREDITS.get("gigpo")(group_of([1.0], [0.0]))
    chat = replace(group_of([1.0], [0.0]), steps=[[Step(prompt_ids=None, response_ids=None)]] * 2)
    with pytest.raises(ValueError, match="a step has no token ids"):
        CREDITS.get("gigpo")(chat)
