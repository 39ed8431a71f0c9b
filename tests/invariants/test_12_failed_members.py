"""Promise 12: Advantages equal those of the group as if members failed by infrastructure or environment had never been
drawn.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgym.credit import CREDITS
from stepgym.credit.treatment import treat
from stepgym.record.outcome import Fault, Outcome, OutcomePolicy
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner

FAILED = [o for o in Outcome if o.fault in (Fault.ENVIRONMENT, Fault.INFRASTRUCTURE, Fault.BUDGET)]
COUNTED = [o for o in Outcome if o.fault in (Fault.NONE, Fault.AGENT)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(list(Outcome)), st.sampled_from([None, 0.0, 0.5, 1.0]), st.integers(1, 3)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(sorted(CREDITS)),
)
def test_advantages_are_those_of_the_group_without_them(
    make: SimpleNamespace, members: list[tuple[Outcome, float | None, int]], credit: str
) -> None:
    made = [
        make.trajectory(1, sample=i, outcome=outcome, reward=reward, turns=turns)
        for i, (outcome, reward, turns) in enumerate(members)
    ]
    never_drawn = [t for t in made if t.outcome in COUNTED]
    results = []
    for trajectories in (made, never_drawn):
        groups, _ = treat(trajectories, OutcomePolicy())
        results.append(
            [
                (member.trajectory.id, advantages.tolist())
                for group in groups
                for member, advantages in zip(group.members, CREDITS.get(credit)(group.rewards), strict=True)
            ]
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("outcome", FAILED)
def test_a_failed_member_changes_neither_loss_nor_gradient(make: SimpleNamespace, outcome: Outcome) -> None:
    made = make.group(1, [1.0, 0.0, 0.5])
    failed = make.trajectory(1, sample=9, outcome=outcome, reward=0.0, turns=3)
    gradients = []
    for trajectories in (made, [*made, failed]):
        policy = make.policy()
        learner = Learner(policy, LearnerConfig())
        (mini,), metrics = learner.prepare(treat(trajectories, OutcomePolicy())[0])
        learner.backward(mini)
        gradients.append(make.gradient(policy))
        assert metrics["members"] == 3
    assert (gradients[0] == gradients[1]).all()
