"""Promise 10: With outcome credit, a trajectory of thirty turns weighs as much as one of two, under the reduction
`trajectory`.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.credit.treatment import treat
from stepgym.record.outcome import OutcomePolicy
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner
from stepgym.train.losses.reduction import token_weights


@pytest.mark.parametrize("credit", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("layout", ["tree", "merged", "steps"])
def test_thirty_turns_weigh_as_much_as_two(make: SimpleNamespace, layout: str, credit: str) -> None:
    made = make.group(1, [1.0, 0.0, 1.0, 0.0], turns=(30, 2, 2, 30))
    learner = Learner(make.policy(layout=layout), LearnerConfig(credit=credit, reduction="trajectory"))
    (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
    weight = np.bincount(mini.trajectory, mini.weight)
    assert weight == pytest.approx([0.25] * 4)
    pull = np.bincount(mini.trajectory, mini.weight * mini.advantage)
    assert pull == pytest.approx(np.array([1, -1, 1, -1]) * abs(pull[0]))
    assert mini.batch.steps == 64


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=30), min_size=1, max_size=8))
def test_each_trajectory_weighs_alike_whatever_its_turns_and_tokens(tokens_per_step: list[list[int]]) -> None:
    trajectory = np.repeat(np.arange(len(tokens_per_step)), [sum(steps) for steps in tokens_per_step])
    flat = [tokens for steps in tokens_per_step for tokens in steps]
    step = np.repeat(np.arange(len(flat)), flat)
    weights = token_weights("trajectory", step=step, trajectory=trajectory, group=np.zeros(len(step), dtype=np.int64))
    assert np.bincount(trajectory, weights) == pytest.approx(np.full(len(tokens_per_step), 1 / len(tokens_per_step)))
