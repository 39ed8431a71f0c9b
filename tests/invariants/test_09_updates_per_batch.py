"""Promise 9: The number of updates per batch depends on groups, never on turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgym.credit.treatment import treat
from stepgym.record.outcome import OutcomePolicy
from stepgym.train.config import LearnerConfig
from stepgym.train.learner import Learner


@pytest.mark.parametrize(
    ("groups", "mini_batches", "epochs", "updates"), [(4, 1, 1, 1), (4, 2, 1, 2), (3, 2, 2, 4), (2, 4, 1, 2)]
)
def test_updates_are_those_of_the_groups_however_many_turns_they_have(
    make: SimpleNamespace, groups: int, mini_batches: int, epochs: int, updates: int
) -> None:
    for turns in ((1, 1), (2, 7)):
        made = [t for g in range(groups) for t in make.group(g, [1.0, 0.0], task=f"task {g}", turns=turns)]
        learner = Learner(make.policy(), LearnerConfig(mini_batches=mini_batches, epochs=epochs))
        report = learner.update(made)
        assert report.updates == learner.updates == report.metrics["updates"] == updates
        assert report.metrics["skipped_updates"] == 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mini_batches_are_whole_groups_formed_before_groups_without_signal_are_dropped(
    make: SimpleNamespace, data: st.DataObject
) -> None:
    signals = data.draw(st.lists(st.booleans(), min_size=1, max_size=6), label="which groups have signal")
    wanted = data.draw(st.integers(1, 4), label="mini_batches")
    turns = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2), label="turns")
    seed = data.draw(st.integers(0, 3), label="seed")
    made = [
        t
        for number, signal in enumerate(signals)
        for t in make.group(number, [1.0, float(not signal)], task=f"task {number}", turns=turns)
    ]
    learner = Learner(make.policy(), LearnerConfig(mini_batches=wanted, seed=seed))
    mini_batches, found = learner.prepare(treat(made, OutcomePolicy())[0])
    count = min(wanted, len(signals))
    assert len(mini_batches) == count
    assert sum(not signal.informative for signal in found) == signals.count(False)
    # All groups with signal are in one mini-batch each, whole; a mini-batch without any is empty and makes no update.
    trained = [len(set(mini.batch.tokens.group.tolist())) for mini in mini_batches]
    assert sum(trained) == sum(signals)
    assert all(number <= -(-len(signals) // count) for number in trained)
    assert all(
        len(set(mini.batch.tokens.trajectory.tolist())) == 2 * n for mini, n in zip(mini_batches, trained, strict=True)
    )


def test_a_mini_batch_without_signal_makes_no_update_and_is_counted(make: SimpleNamespace) -> None:
    made = [*make.group(0, [1.0, 1.0], task="a"), *make.group(1, [1.0, 0.0], task="b")]
    report = Learner(make.policy(), LearnerConfig(mini_batches=2)).update(made)
    assert (report.updates, report.metrics["skipped_updates"], report.metrics["zero_variance_groups"]) == (1, 1, 1)


def test_dropped_groups_leave_the_denominator(make: SimpleNamespace) -> None:
    signal = make.group(1, [1.0, 0.0, 0.5], task="signal")
    silent = make.group(2, [1.0, 1.0, 1.0], task="silent")
    gradients = []
    for made in (signal, signal + silent):
        for reduction in ("token", "step", "trajectory", "group"):
            policy = make.policy()
            learner = Learner(policy, LearnerConfig(reduction=reduction))
            (mini,), _ = learner.prepare(treat(made, OutcomePolicy())[0])
            learner.backward(mini)
            gradients.append(make.gradient(policy))
    for alone, together in zip(gradients[:4], gradients[4:], strict=True):
        assert (alone == together).all()
