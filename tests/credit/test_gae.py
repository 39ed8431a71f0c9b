"""GAE: the recursion over trained tokens, where rewards sit, and which trajectories are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.credit import CREDITS
from stepgym.credit.gae import gae
from stepgym.credit.token_rewards import TokenAdvantages, TokenRewards, assign_tokens, require_chains
from stepgym.errors import UserError
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory, TrajectoryId


def tokens(
    values: list[float],
    step: list[int],
    step_rewards: list[list[float]],
    kl: list[float] | None = None,
    coef: float = 0,
) -> TokenRewards:
    rewards = [np.array(steps, dtype=np.float64) for steps in step_rewards]
    per_token = None if kl is None else np.array(kl)
    return TokenRewards.of(np.array(values), np.array(step, dtype=np.int64), rewards, per_token, coef)


def test_gae_by_hand() -> None:
    # One trajectory: two tokens in its first step, which gives 1, and one in its second, which gives 2; gamma and
    # lambda 0.5. Errors: 0 + 0.5 * 0.25 - 0.5 = -0.375; 1 + 0.5 * 0.75 - 0.25 = 1.125; 2 - 0.75 = 1.25. Summed with
    # 0.25: 1.25; 1.125 + 0.25 * 1.25 = 1.4375; -0.375 + 0.25 * 1.4375 = -0.015625.
    batch = tokens([0.5, 0.25, 0.75], [0, 0, 1], [[1.0, 2.0]])
    found = gae(batch, gamma=0.5, gae_lambda=0.5, whiten=False)
    assert found.advantages.tolist() == [-0.015625, 1.4375, 1.25]
    assert found.returns.tolist() == [0.484375, 1.6875, 2.0]


def test_each_trajectory_ends_with_a_value_of_zero() -> None:
    # Two trajectories of one token each; if the second's value leaked into the first, it would be -0.5 + 8.
    batch = tokens([0.5, 8.0], [0, 1], [[0.0], [1.0]])
    assert gae(batch, whiten=False).advantages.tolist() == [-0.5, -7.0]


def test_lambda_zero_is_one_step_ahead_and_one_is_the_rewards_still_to_come() -> None:
    batch = tokens([1.0, 2.0, 4.0], [0, 1, 1], [[3.0, -1.0]])
    assert gae(batch, gae_lambda=0.0, whiten=False).advantages.tolist() == [3 + 2 - 1.0, 4 - 2.0, -1 - 4.0]
    full = gae(batch, gae_lambda=1.0, whiten=False)
    assert full.returns.tolist() == [2.0, -1.0, -1.0]
    assert full.advantages.tolist() == [1.0, -3.0, -5.0]


def test_whitening_is_over_the_tokens_of_the_batch_and_leaves_the_returns_alone() -> None:
    # Advantages 1, -3, -5: mean -7 / 3, deviations 10, -2, -8 thirds; variance (100 + 4 + 64) / 9 / 2 = 28 / 3.
    batch = tokens([1.0, 2.0, 4.0], [0, 1, 1], [[3.0, -1.0]])
    found = gae(batch)
    assert found.advantages == pytest.approx(np.array([10, -2, -8]) / 3 / np.sqrt(28 / 3), rel=1e-6)
    assert found.returns.tolist() == [2.0, -1.0, -1.0]
    assert gae(tokens([2.0], [0], [[1.0]])).advantages.tolist() == [0.0]
    assert gae(tokens([], [], [])).advantages.tolist() == []


def test_rewards_sit_on_the_last_trained_token_of_their_step() -> None:
    # Steps 0..2 of the first trajectory, of which 1 has no trained token; 3 and 4 of the second, of which 3 has none;
    # the third trajectory has no trained token at all, and the fourth gives nothing.
    batch = tokens([0] * 6, [0, 0, 2, 4, 4, 6], [[1.0, 2.0, 4.0], [8.0, 16.0], [32.0], [0.0]])
    assert batch.rewards.tolist() == [0.0, 3.0, 4.0, 8.0, 16.0, 0.0]
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1, 3]


def test_the_kl_costs_each_token_its_own() -> None:
    batch = tokens([0.0] * 3, [0, 0, 1], [[1.0, 2.0]], kl=[1.0, -2.0, 4.0], coef=0.5)
    assert batch.rewards.tolist() == [-0.5, 1.0 + 1.0, 2.0 - 2.0]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2)), max_size=4), min_size=1, max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_it_is_the_sum_that_the_paper_writes(
    trajectories: list[list[tuple[int, float]]], gamma: float, gae_lambda: float, seed: int
) -> None:
    """Equation 16 as a double sum, trajectory by trajectory."""
    flat = [count for steps in trajectories for count, _ in steps]
    step = np.repeat(np.arange(len(flat)), flat)
    values = np.random.default_rng(seed).normal(size=len(step))
    batch = TokenRewards.of(values, step, [np.array([r for _, r in steps]) for steps in trajectories])
    found = gae(batch, gamma=gamma, gae_lambda=gae_lambda, whiten=False)
    for number in range(len(trajectories)):
        own = np.flatnonzero(batch.trajectory == number)
        v, r = [*values[own], 0.0], batch.rewards[own]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(own))]
        expected = [
            sum((gamma * gae_lambda) ** (k - t) * delta[k] for k in range(t, len(own))) for t in range(len(own))
        ]
        assert found.advantages[own] == pytest.approx(expected, abs=1e-9)
        rewarded = sum(reward for _, reward in trajectories[number]) if len(own) else 0.0
        assert r.sum() == pytest.approx(rewarded, abs=1e-9)


def test_mini_batches_are_put_together_and_taken_apart_again() -> None:
    first, second = tokens([1.0, 2.0], [0, 1], [[0.0, 1.0]]), tokens([3.0], [1], [[], [0.0, 5.0]])
    nothing = tokens([], [], [])
    found = assign_tokens(CREDITS.get("gae"), [first, nothing, second], {"whiten": False})
    assert [part.advantages.tolist() for part in found] == [[0.0, -1.0], [], [2.0]]
    assert [part.returns.tolist() for part in found] == [[1.0, 1.0], [], [5.0]]
    # Whitening is over all of them: -1, 0, 2 have mean 1 / 3.
    whitened = assign_tokens(CREDITS.get("gae"), [first, second], {})
    joined = np.concatenate([part.advantages for part in whitened])
    assert joined.mean() == pytest.approx(0, abs=1e-12)
    assert joined.std(ddof=1) == pytest.approx(1, rel=1e-5)
    assert assign_tokens(CREDITS.get("gae"), [], {}) == []


def test_what_a_token_estimator_may_not_return_is_named() -> None:
    def short(batch: TokenRewards) -> TokenAdvantages:
        return TokenAdvantages(batch.values[:-1], batch.values)

    def broken(batch: TokenRewards) -> TokenAdvantages:
        return TokenAdvantages(batch.values, batch.values / 0)

    batch = tokens([1.0, 2.0], [0, 0], [[0.0]])
    with pytest.raises(ValueError, match=r"credit short returned advantages of shape \(1,\) for 2 tokens"):
        assign_tokens(short, [batch], {})
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="credit broken returned returns that are not"):
        assign_tokens(broken, [batch], {})
    with pytest.raises(ValueError, match="differ in length"):
        TokenRewards(np.zeros(2), np.zeros(1), np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64))


# ---- which trajectories ---------------------------------------------------------------------------------------------


def trajectory(*prompts_and_responses: tuple[list[int], list[int]], **fields: str) -> Trajectory:
    steps = [Step(prompt_ids=p, response_ids=r, **fields) for p, r in prompts_and_responses]
    return Trajectory(id=TrajectoryId("train", 0, "t", 3), outcome=Outcome.COMPLETED, steps=steps, reward=1.0)


def test_one_unbroken_conversation_passes() -> None:
    require_chains([trajectory(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [])), trajectory()], "gae")
    some_logprobs = trajectory(([1], [2]), ([1, 2, 3], [4]))
    steps = [replace(some_logprobs.steps[0], logprobs=[-1.0]), some_logprobs.steps[1]]
    require_chains([replace(some_logprobs, steps=steps)], "gae")


@pytest.mark.parametrize(
    ("steps", "step", "why"),
    [
        ([([1, 2, 3], [4]), ([1, 3, 4, 5], [6])], 1, "prefix mismatch"),  # history was rewritten
        ([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3], [6])], 2, "branched"),  # two steps go on from the first
        ([([1], [2]), ([7], [8])], 1, "another conversation begins"),  # a sub-agent
    ],
)
def test_steps_that_branch_or_overlap_are_refused_in_one_line(
    steps: list[tuple[list[int], list[int]]], step: int, why: str
) -> None:
    with pytest.raises(UserError) as refused:
        require_chains([trajectory(([1], [2])), trajectory(*steps)], "gae")
    message = str(refused.value)
    assert message.startswith(f"trajectory train/0/t/3/0, step {step}: credit gae runs over the tokens of one unbroken")
    assert f"({why}); use an outcome credit" in message
    assert "\n" not in message


def test_the_renderers_own_reason_is_given() -> None:
    rewritten = trajectory(([1, 2, 3], [4]), ([1, 3, 4, 5], [6]), rendering="thinking_stripped")
    with pytest.raises(UserError, match=r"\(thinking stripped\)"):
        require_chains([rewritten], "gae")
