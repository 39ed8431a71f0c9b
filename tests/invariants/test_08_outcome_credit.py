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


def by_hand(credit: str, rewards: list[float], others: list[float]) -> np.ndarray:
    """The advantages of a group, beside a group of equal rewards `others` in the same batch."""
    r = np.array(rewards)
    batch = np.array([*rewards, *others])
    centred = np.concatenate([r - r.mean(), np.zeros(len(others))])
    n = len(rewards)
    return {
        "grpo": (r - r.mean()) / (r.std(ddof=1) + 1e-6),
        "dr_grpo": r - r.mean(),
        "rloo": (r - r.mean()) * n / (n - 1),
        "maxrl": (r - r.mean()) / (r.mean() + 1e-6),
        "reinforce": r - batch.mean(),
        "reinforce_plus_plus": (r - batch.mean()) / (batch.std(ddof=1) + 1e-6),
        "reinforce_plus_plus_baseline": centred[:n] / (centred.std(ddof=1) + 1e-6),
    }[credit]


@pytest.mark.parametrize(
    "credit",
    ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
@pytest.mark.parametrize("layout", ["tree", "merged", "steps"])
def test_each_trained_token_is_a_response_token_and_carries_its_trajectorys_advantage(
    make: SimpleNamespace, credit: str, layout: str
) -> None:
    rewards, others = [1.0, 0.0, 0.25, 0.75], [0.5, 0.5]
    made = make.group(3, rewards, turns=(1, 6, 2, 3), breaks=(2,), masked_tokens=True)
    equal = make.group(4, others, task="zz", turns=(2, 9))
    learner = Learner(make.policy(layout=layout), LearnerConfig(credit=credit))
    (mini,), _ = learner.prepare(treat([*made, *equal], OutcomePolicy())[0])
    advantages, found = by_hand(credit, rewards, others), 0
    own = mini.advantage[mini.group == 0].numpy()
    expected = {}  # step number -> its trajectory's advantage and the ids of its trained tokens
    for index, trajectory in enumerate(made):
        for step in trajectory.steps:
            expected[len(expected)] = (advantages[index], step.response_ids[step.loss_mask == 1].tolist())
    seen: dict[int, list[int]] = {number: [] for number in expected}
    for micro_batch in mini.micro_batches:
        target = micro_batch.target if micro_batch.which is None else micro_batch.target[micro_batch.which]
        for token, said in sorted(zip(micro_batch.token.tolist(), target.tolist(), strict=True)):
            if token < len(own):
                number = int(mini.batch.tokens.step[token])
                assert own[token] == pytest.approx(expected[number][0])
                seen[number].append(said)
                found += 1
    assert found == len(own) == sum(int(step.loss_mask.sum()) for t in made for step in t.steps)
    assert seen == {number: ids for number, (_, ids) in expected.items()}
