from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.errors import UnscorableTask, UserError
from stepgym.model.engines.base import ChatCompletion, ChatEngine
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.rollouts import RolloutConfig, rollout
from stepgym.run.statistics import EpisodeScore, is_unscorable, summarize


def step(prompt: int = 3, response: int = 2, **fields: Any) -> Step:
    return Step(prompt_ids=np.arange(prompt), response_ids=np.arange(response), **fields)


def episode(task: str, sample: int = 0, reward: float | None = 0.0, **fields: Any) -> Trajectory:
    identity = TrajectoryId("eval", 0, task, sample, fields.pop("attempt", 0))
    given_fields: dict[str, Any] = {
        "outcome": Outcome.COMPLETED,
        "success": None if reward is None else reward >= 1,
        "steps": (step(),),
        "env_id": "stepgym/sql-v0",
        "task": {"id": task, "prompt": "?", "answer": task, "data": {}},
    }
    return Trajectory(id=identity, reward=reward, **{**given_fields, **fields})


def test_means_are_over_tasks_and_pass_at_k_is_per_task() -> None:
    result = summarize(
        [episode("a", i, reward) for i, reward in enumerate([1, 0, 0, 1])]
        + [episode("b", i, reward) for i, reward in enumerate([0, 0, 0, 0])]
    )
    assert result.mean_reward == result.success == result.pass_at[1] == 0.25
    assert result.pass_at == pytest.approx({1: 1 / 4, 2: 5 / 12, 3: 1 / 2, 4: 1 / 2})
    assert result.pass_at_tasks == {1: 2, 2: 2, 3: 2, 4: 2}
    assert (result.episodes, result.tasks, result.outcomes) == (8, 2, {"completed": 8})
    assert result.ci95 is not None
    assert result.ci95[0] <= 0.25 <= result.ci95[1]
    assert not result.incomplete


def test_tasks_weigh_the_same_when_failures_left_one_of_them_short() -> None:
    failed = episode("b", 1, None, outcome=Outcome.ENGINE_ERROR)
    result = summarize([episode("a", 0, 1), episode("a", 1, 1), episode("b", 0, 0), failed])
    assert result.success == 0.5
    assert result.pass_at == {1: 0.5, 2: 1.0}
    assert result.pass_at_tasks == {1: 2, 2: 1}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_whose_fault_decides_whether_an_episode_counts(outcome: Outcome) -> None:
    """DESIGN 4, Outcome: agent and budget outcomes count, unscored = 0; the rest is excluded and counted."""
    result = summarize([episode("a", 0, 1), episode("b", 0, None, outcome=outcome)])
    assert result.outcomes == {"completed": 2} if outcome is Outcome.COMPLETED else {"completed": 1, outcome: 1}
    if outcome.scored:
        assert (result.episodes, result.mean_reward, result.excluded) == (2, 0.5, {})
        assert not result.incomplete
    else:
        assert (result.episodes, result.mean_reward, result.excluded) == (1, 1.0, {str(outcome): 1})
        assert result.incomplete


def test_a_reward_given_before_the_budget_ran_out_is_kept() -> None:
    assert summarize([episode("a", 0, -1.0, outcome=Outcome.CONTEXT_OVERFLOW)]).mean_reward == -1


@pytest.mark.parametrize(("failed", "incomplete"), [(0, False), (2, False), (3, True)])
def test_more_than_two_percent_of_failures_make_a_result_incomplete(failed: int, incomplete: bool) -> None:
    episodes = [episode(str(i), 0, 1) for i in range(100 - failed)]
    episodes += [episode(f"failed {i}", 0, None, outcome=Outcome.ENV_TIMEOUT) for i in range(failed)]
    assert summarize(episodes).incomplete is incomplete


def test_an_interrupted_evaluation_is_incomplete() -> None:
    result = summarize([episode(str(i), 0, 1) for i in range(90)], expected=100)
    assert (result.missing, result.incomplete, result.episodes) == (10, True, 90)
    assert not summarize([episode(str(i), 0, 1) for i in range(90)], expected=90).incomplete


def test_unscorable_tasks_are_named_and_are_neither_zeros_nor_failures() -> None:
    detail = "unscorable task: the gold query returns no rows"
    unscorable = [episode("u", i, None, outcome=Outcome.ENV_ERROR, outcome_detail=detail) for i in range(2)]
    result = summarize([episode("a", 0, 1), *unscorable])
    assert (result.success, result.unscorable_tasks, result.excluded) == (1.0, ("u",), {"unscorable": 2})
    assert not result.incomplete


class SilentEngine(ChatEngine):
    """Never asked: the episode fails before the model's first turn."""

    async def chat(self, messages: Any, sampling: Any, **options: Any) -> Any:
        raise AssertionError("no turn is to be sampled for a task that cannot be scored")


class Parrot(ChatEngine):
    """Always says the same."""

    async def chat(self, messages: Any, sampling: Any, **options: Any) -> ChatCompletion:
        return ChatCompletion({"role": "assistant", "content": "yes"}, "stop", prompt_tokens=5, response_tokens=2)


class OneTurn(Env):
    """Solved by any answer."""

    def act(self, message: Any) -> Any:
        return [], 1.0, True, False, {}


class Unscorable(Env):
    """An environment whose only task has no answer to score against."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="u")]

    def begin(self, task: Task) -> Any:
        raise UnscorableTask("the gold answer is empty")


def test_an_unscorable_task_is_recognised_as_the_rollout_records_it() -> None:
    trajectories = rollout(Unscorable, [Task(id="u")], SilentEngine(), config=RolloutConfig(samples=2))
    result = summarize(trajectories, expected=2)
    assert result.unscorable_tasks == ("u",)
    assert (result.episodes, result.excluded, result.incomplete) == (0, {"unscorable": 2}, False)


def test_another_environment_error_is_not_an_unscorable_task() -> None:
    error = episode("a", outcome=Outcome.ENV_ERROR, outcome_detail="ValueError: no unscorable task here")
    assert not is_unscorable(error)
    assert not is_unscorable(episode("a", outcome_detail="unscorable task: said by an agent"))


def test_attempts_that_were_retried_are_counted_and_change_nothing() -> None:
    retried = episode("a", 0, None, outcome=Outcome.ENGINE_TIMEOUT, final=False)
    with_retry = summarize([retried, episode("a", 0, 1, attempt=1)], wall_s=1)
    without = summarize([episode("a", 0, 1, attempt=1)], wall_s=1)
    assert with_retry.failed_attempts == {"engine_timeout": 1}
    assert replace(with_retry, failed_attempts={}) == without


def test_turns_tokens_and_errors_are_counted() -> None:
    steps = [
        step(10, 5),
        step(20, 6, status="malformed"),
        step(30, 7, status="no_action"),
        step(40, 8, metrics={"action_error": 1.0}),
    ]
    result = summarize([episode("a", 0, 1, steps=steps), episode("b", 0, 0, steps=())])
    assert (result.turns, result.turns_mean) == (4, 2.0)
    assert (result.prompt_tokens, result.prompt_tokens_mean) == (100, 50.0)
    assert (result.response_tokens, result.response_tokens_mean) == (26, 13.0)
    assert result.statuses == {"ok": 2, "malformed": 1, "no_action": 1}
    assert (result.action_errors, result.action_error_rate, result.malformed_rate) == (3, 0.75, 0.25)


def test_an_endpoint_that_only_speaks_chat_reports_its_own_token_counts() -> None:
    chat = Step(prompt_ids=None, response_ids=None, metrics={"prompt_tokens": 11.0, "response_tokens": 4.0})
    result = summarize([episode("a", 0, 1, steps=(chat, chat))])
    assert (result.prompt_tokens, result.response_tokens) == (22, 8)


def test_trajectories_read_without_their_steps_still_have_turns_and_tokens(tmp_path: Path) -> None:
    trajectories = rollout(OneTurn, [Task(id="a"), Task(id="b")], Parrot(), config=RolloutConfig(samples=2))
    with TrajectoryStore(tmp_path, mode="a") as store:
        for trajectory in trajectories:
            store.append(trajectory)
    with TrajectoryStore(tmp_path) as store:
        whole, light = summarize(store, wall_s=1), summarize(store.read(with_steps=False), wall_s=1)
    assert (whole.turns, whole.prompt_tokens, whole.response_tokens) == (4, 20, 8)
    assert (light.turns, light.prompt_tokens, light.response_tokens) == (4, 20, 8)
    assert (whole.malformed_rate, light.malformed_rate, light.statuses) == (0.0, None, {})
    assert replace(light, statuses=whole.statuses, malformed_rate=0.0, action_error_rate=0.0) == whole


def test_wall_time_runs_from_the_first_start_to_the_last_end_unless_given() -> None:
    episodes = [
        episode("a", started_at=100.0, metrics={"wall_s": 5.0}),
        episode("b", started_at=102.0, metrics={"wall_s": 1.0}),
    ]
    assert summarize(episodes).wall_s == 5.0
    assert summarize(episodes, wall_s=9.5).wall_s == 9.5


def test_nothing_scored_gives_no_numbers_rather_than_zeros() -> None:
    for result in (summarize([]), summarize([episode("a", reward=None, outcome=Outcome.ENV_ERROR)])):
        assert result.mean_reward is result.success is result.ci95 is result.turns_mean is None
        assert result.pass_at == {}
        json.dumps(result.to_dict(), allow_nan=False)
    assert not summarize([]).incomplete
    assert summarize([], expected=1).incomplete


def test_the_dictionary_holds_what_summary_json_promises() -> None:
    result = summarize([episode("a", 0, 1), episode("a", 1, 0), episode("b", 0, 1), episode("b", 1, 1)], wall_s=2.5)
    table = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert table == result.to_dict()
    assert table["mean_reward"] == 0.75
    assert table["pass_at"] == {"1": 0.75, "2": 1.0}
    low, high = table["ci95"]
    assert low <= 0.75 <= high
    assert (table["episodes"], table["outcomes"], table["wall_s"]) == (4, {"completed": 4}, 2.5)
    assert "per_task" not in table


def test_mixed_or_doubled_trajectories_are_refused() -> None:
    other = replace(episode("b"), id=TrajectoryId("validation", 3, "b", 0))
    with pytest.raises(UserError, match=r"phase eval, iteration 0, stepgym/sql-v0; phase validation, iteration 3"):
        summarize([episode("a"), other])
    with pytest.raises(UserError, match="'a', sample 0 has 2 final trajectories"):
        summarize([episode("a"), episode("a", attempt=1)])


rows = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from([None, 0.0, 0.5, 1.0]),
        st.sampled_from(list(Outcome)),
        st.integers(0, 3),
    ),
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_everything_is_accounted_for(table: list[Any], random: Any) -> None:
    episodes = [
        episode(task, i, reward, outcome=outcome, steps=(step(),) * turns)
        for i, (task, reward, outcome, turns) in enumerate(table)
    ]
    result = summarize(episodes, resamples=50)
    assert sum(result.outcomes.values()) == result.episodes + sum(result.excluded.values()) == len(episodes)
    assert result.turns == sum(result.statuses.values())
    if result.tasks:
        assert result.success == pytest.approx(result.pass_at[1])
        assert result.mean_reward == pytest.approx(np.mean([task.reward for task in result.per_task.values()]))
    random.shuffle(episodes)
    shuffled = summarize((EpisodeScore.of(each) for each in episodes), resamples=50)
    assert shuffled.per_task.keys() == result.per_task.keys()
    assert shuffled.mean_reward == pytest.approx(result.mean_reward)
    assert (shuffled.outcomes, shuffled.pass_at_tasks) == (result.outcomes, result.pass_at_tasks)
