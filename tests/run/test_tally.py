"""Totals count final episodes once, attempts once, and what could not be scored never as reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.record.outcome import Fault, Outcome, OutcomePolicy
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.tally import Tally


def made(outcome: Outcome, *, reward: float | None = None, final: bool = True, turns: int = 1, **fields: Any) -> Any:
    return Trajectory(
        id=TrajectoryId("train", 0, "t", 0),
        outcome=outcome,
        final=final,
        reward=reward,
        success=None if reward is None else reward > 0.5,
        steps=[Step(prompt_ids=[1], response_ids=[2, 3])] * turns,
        metrics={"response_tokens": 2.0 * turns},
        **fields,
    )


def test_nothing_has_ended_yet() -> None:
    tally = Tally()
    assert math.isnan(tally.mean_reward)
    assert math.isnan(tally.success)
    assert tally.infrastructure_share(OutcomePolicy()) == 0.0
    assert tally.tokens_per_second == 0.0


def test_failed_attempts_and_resumed_episodes() -> None:
    tally = Tally()
    tally.add(made(Outcome.ENV_ERROR, final=False, turns=3))
    tally.add(made(Outcome.COMPLETED, reward=1.0, turns=2))
    tally.add(made(Outcome.TURN_LIMIT, reward=0.0, turns=5), resumed=True)
    assert (tally.attempts, tally.episodes, tally.turns, tally.response_tokens) == (2, 2, 5, 10)
    assert tally.outcomes == {"completed": 1, "turn_limit": 1}
    assert (tally.mean_reward, tally.success) == (0.5, 0.5)


@given(st.lists(st.tuples(st.sampled_from(list(Outcome)), st.sampled_from([None, 0.0, 0.25, 1.0]), st.booleans())))
def test_the_mean_is_over_what_was_scored(drawn: list[tuple[Outcome, float | None, bool]]) -> None:
    tally = Tally()
    for outcome, reward, final in drawn:
        tally.add(made(outcome, reward=reward, final=final))
    rewards = [reward for _, reward, final in drawn if final and reward is not None]
    assert tally.scored == len(rewards)
    assert sum(tally.outcomes.values()) == tally.episodes == sum(final for _, _, final in drawn)
    assert tally.attempts == len(drawn)
    if rewards:
        assert tally.mean_reward == pytest.approx(sum(rewards) / len(rewards))


@given(st.lists(st.sampled_from(list(Outcome)), max_size=60), st.integers(1, 30))
def test_the_share_of_faults_is_that_of_the_latest_attempts(drawn: list[Outcome], window: int) -> None:
    tally, policy = Tally(), OutcomePolicy(window=window)
    for outcome in drawn:
        tally.add(made(outcome))
    latest = drawn[-window:]
    share = sum(o.fault is Fault.INFRASTRUCTURE for o in latest) / max(1, len(latest))
    assert tally.infrastructure_share(policy) == (share if len(latest) >= window / 5 else 0.0)
