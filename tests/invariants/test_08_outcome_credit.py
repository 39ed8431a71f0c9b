"""Promise 8: With outcome credit, every step of a trajectory gets its trajectory's advantage on its own response
positions.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from stepgym.credit.treatment import treat
from stepgym.record.outcome import OutcomePolicy
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner


@pytest.mark.parametrize("credit", ["grpo", "rloo", "maxrl"])
@pytest.mark.parametrize("rows", ["merged", "steps"])
def test_each_trained_token_is_a_response_token_and_carries_its_trajectorys_advantage(
    make: SimpleNamespace, credit: str, rows: str
) -> None:
    rewards = [1.0, 0.0, 0.25, 0.75]
    made = make.group(3, rewards, turns=(1, 6, 2, 3), breaks=(2,), masked_tokens=True)
    learner = Learner(make.policy(), LearnerConfig(credit=credit, rows=rows))
    (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
    mean, count = np.mean(rewards), len(rewards)
    by_hand = {
        "grpo": (np.array(rewards) - mean) / (np.std(rewards, ddof=1) + 1e-6),
        "rloo": (np.array(rewards) - mean) * count / (count - 1),
        "maxrl": (np.array(rewards) - mean) / (mean + 1e-6),
    }[credit]
    advantage, found = mini.advantage.numpy(), 0
    expected = {}  # step number -> its trajectory's advantage and the ids of its trained tokens
    for index, trajectory in enumerate(made):
        for step in trajectory.steps:
            expected[len(expected)] = (by_hand[index], step.response_ids[step.loss_mask == 1].tolist())
    seen: dict[int, list[int]] = {number: [] for number in expected}
    for row in mini.batch.rows:
        for token, position in zip(row.token, row.position, strict=True):
            number = int(mini.batch.tokens.step[token])
            assert advantage[token] == pytest.approx(expected[number][0])
            seen[number].append(int(row.ids[position]))
            found += 1
    assert found == len(mini.batch.tokens) == sum(int(step.loss_mask.sum()) for t in made for step in t.steps)
    assert seen == {number: ids for number, (_, ids) in expected.items()}
