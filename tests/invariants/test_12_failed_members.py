"""Promise 12: Advantages equal those of the group as if members failed by infrastructure or environment had never been
drawn.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgym.credit import CREDITS
from stepgym.credit.group import assign_all
from stepgym.credit.level import level
from stepgym.credit.token_rewards import TokenRewards, assign_tokens
from stepgym.credit.treatment import treat
from stepgym.record.outcome import Fault, Outcome, OutcomePolicy
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner

FAILED = [o for o in Outcome if o.fault in (Fault.ENVIRONMENT, Fault.INFRASTRUCTURE, Fault.BUDGET)]
COUNTED = [o for o in Outcome if o.fault in (Fault.NONE, Fault.AGENT)]


def credited(trajectories: list[Trajectory], credit: str) -> list[tuple[TrajectoryId, list[float]]]:
    """The members with their advantages: one per step, or per token where a critic gives values."""
    groups, _ = treat(trajectories, OutcomePolicy())
    members = [member for group in groups for member in group.members]
    function = CREDITS.get(credit)
    if level(function) != "token":
        found = assign_all(function, [group.rewards for group in groups], {})
        return [
            (m.trajectory.id, a.tolist()) for m, a in zip(members, [a for group in found for a in group], strict=True)
        ]
    ids = [step.response_ids for member in members for step in member.trajectory.steps]
    step = np.repeat(np.arange(len(ids)), [len(tokens) for tokens in ids])
    values = np.sin(np.concatenate([np.zeros(0), *ids]))  # some value of each token, the same in both batches
    tokens = TokenRewards.of(values, step, [member.step_rewards for member in members])
    (given_to,) = assign_tokens(function, [tokens], {})
    return [(m.trajectory.id, given_to.advantages[tokens.trajectory == i].tolist()) for i, m in enumerate(members)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Outcome)),
            st.sampled_from([None, 0.0, 0.5, 1.0]),
            st.integers(1, 3),
            st.sampled_from(["a", "b"]),
        ),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from(sorted(CREDITS)),
)
def test_advantages_are_those_of_the_group_without_them(
    make: SimpleNamespace, members: list[tuple[Outcome, float | None, int, str]], credit: str
) -> None:
    made = [
        make.trajectory(1, sample=i, outcome=outcome, reward=reward, turns=turns, task=task)
        for i, (outcome, reward, turns, task) in enumerate(members)
    ]
    never_drawn = [t for t in made if t.outcome in COUNTED]
    assert credited(made, credit) == credited(never_drawn, credit)


@pytest.mark.parametrize("outcome", FAILED)
def test_a_failed_member_changes_neither_loss_nor_gradient(make: SimpleNamespace, outcome: Outcome) -> None:
    made = make.group(1, [1.0, 0.0, 0.5])
    failed = make.trajectory(1, sample=9, outcome=outcome, reward=0.0, turns=3)
    gradients = []
    for trajectories in (made, [*made, failed]):
        policy = make.policy()
        learner = Learner(policy, LearnerConfig())
        (mini,), (signal,) = learner.prepare(treat(trajectories, OutcomePolicy())[0])
        learner.backward(mini)
        gradients.append(make.gradient(policy))
        assert len(signal.group.members) == 3
    assert (gradients[0] == gradients[1]).all()
