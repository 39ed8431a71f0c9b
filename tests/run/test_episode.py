"""An episode ends with an outcome that says whose fault it was, and its environment is closed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import gymnasium
import pytest

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.errors import ContextOverflow, UnscorableTask
from stepgym.record.outcome import Outcome
from stepgym.run.agent import ChatAgent
from stepgym.run.episode import Episode, EpisodeLimits, EpisodeResult
from stepgym.run.session import Session, SessionLimits

TASK = Task(id="t", prompt="Count.")


def play(
    env: Any, engine: Any, renderer: Any, *, agent: Any = None, limits: Any = None, **session: Any
) -> tuple[EpisodeResult, Session]:
    line = Session(engine, renderer, **session)
    episode = Episode(env, TASK, line, limits=limits)
    return asyncio.run(episode.play(agent or ChatAgent(), seed=1)), line


def closing(env: Env) -> list[bool]:
    closed: list[bool] = []
    env.close = lambda: closed.append(True)  # type: ignore[method-assign]
    return closed


def test_a_completed_episode_has_its_rewards_on_its_steps(
    count_env: Any, parrot: Any, renderer: Any, counts: Any
) -> None:
    env = count_env()
    closed = closing(env)
    result, session = play(env, parrot(counts), renderer)
    assert result.outcome is Outcome.COMPLETED
    assert result.reward == pytest.approx(0.75)
    assert result.success is True
    assert result.reward_parts == {"counted": 0.75}
    assert [step.reward for step in session.steps] == [0.25] * 3
    assert [step.metrics["at"] for step in session.steps] == [2, 3, 4]
    assert closed == [True]


def test_turns_without_an_action_cost_turns_and_the_turn_limit_ends_it(
    count_env: Any, parrot: Any, renderer: Any
) -> None:
    result, session = play(count_env(), parrot(lambda p, s: "what?"), renderer)
    assert result.outcome is Outcome.TURN_LIMIT
    assert result.reward == 0.0
    assert result.success is False
    assert [step.status for step in session.steps] == ["no_action"] * 6
    assert session.steps[0].metrics["action_error"] == 1


class Broken(Env):
    """Fails where it is told to."""

    def __init__(self, where: str, how: BaseException | float | None = None) -> None:
        self.where, self.how = where, RuntimeError("boom") if how is None else how

    def fail(self, place: str) -> None:
        if place == self.where:
            if isinstance(self.how, BaseException):
                raise self.how
            time.sleep(self.how)

    def begin(self, task: Task) -> Any:
        self.fail("begin")
        return "go"

    def act(self, message: Any) -> Any:
        self.fail("act")
        return "on", 0.5, False, False, {}

    def conclude(self, outcome: Outcome) -> float:
        self.fail("conclude")
        return -1.0

    def close(self) -> None:
        self.fail("close")


@pytest.mark.parametrize("where", ["begin", "act"])
def test_an_exception_in_the_environment_is_its_fault_and_no_reward(where: str, parrot: Any, renderer: Any) -> None:
    result, session = play(Broken(where), parrot(lambda p, s: "x"), renderer)
    assert result.outcome is Outcome.ENV_ERROR
    assert result.reward is None
    assert result.success is None
    assert "boom" in result.detail
    assert "Traceback" in result.error
    assert len(session.steps) == (where == "act")


def test_a_hung_environment_is_left_behind(parrot: Any, renderer: Any) -> None:
    started = time.perf_counter()
    result, _ = play(Broken("act", 3.0), parrot(lambda p, s: "x"), renderer, limits=EpisodeLimits(step_timeout=0.1))
    assert result.outcome is Outcome.ENV_TIMEOUT
    assert result.reward is None
    assert time.perf_counter() - started < 2


def test_a_close_that_fails_or_hangs_does_not_change_the_outcome(parrot: Any, renderer: Any) -> None:
    for how in (RuntimeError("stuck"), 2.0):
        env = Broken("close", how)
        env.max_turns = 1
        result, _ = play(env, parrot(lambda p, s: "x"), renderer, limits=EpisodeLimits(step_timeout=0.1))
        assert result.outcome is Outcome.TURN_LIMIT
        assert result.reward == -0.5
        assert result.metrics["close_failed"] == 1


def test_an_environment_that_fails_to_conclude_is_at_fault(parrot: Any, renderer: Any) -> None:
    result, _ = play(Broken("conclude"), overflow(parrot), renderer)
    assert result.outcome is Outcome.ENV_ERROR
    assert result.reward is None


def overflow(parrot: Any) -> Any:
    engine = parrot(lambda p, s: "x")
    engine.context_length = 60
    return engine


def test_a_context_overflow_is_concluded_by_the_environment(parrot: Any, renderer: Any) -> None:
    result, session = play(Broken("nowhere"), overflow(parrot), renderer)
    assert result.outcome is Outcome.CONTEXT_OVERFLOW
    assert result.reward == pytest.approx(0.5 * (len(session.steps)) - 1.0)
    assert session.steps[-1].reward == pytest.approx(0.5 - 1.0)


def test_a_first_prompt_over_the_limit_is_an_overflow_without_steps(count_env: Any, parrot: Any, renderer: Any) -> None:
    session = Session(parrot(lambda p, s: "x"), renderer, limits=SessionLimits(max_prompt_tokens=3))
    result = asyncio.run(Episode(count_env(), TASK, session).play(ChatAgent(), seed=1))
    assert result.outcome is Outcome.CONTEXT_OVERFLOW
    assert session.steps == []
    assert result.reward == 0.0


def test_an_agent_that_raises_is_at_fault_and_one_that_swallows_changes_nothing(
    count_env: Any, parrot: Any, renderer: Any
) -> None:
    class Raises:
        async def run(self, episode: Episode) -> None:
            raise KeyError("mine")

    class Swallows:
        async def run(self, episode: Episode) -> None:
            try:
                while True:
                    await episode.step(await episode.session.chat(episode.messages))
            except ContextOverflow:
                pass

    class Leaves:
        async def run(self, episode: Episode) -> None:
            await episode.session.chat(episode.messages)

    assert play(count_env(), parrot(lambda p, s: "x"), renderer, agent=Raises())[0].outcome is Outcome.AGENT_ERROR
    assert play(count_env(), overflow(parrot), renderer, agent=Swallows())[0].outcome is Outcome.CONTEXT_OVERFLOW
    left = play(count_env(), parrot(lambda p, s: "x"), renderer, agent=Leaves())[0]
    assert left.outcome is Outcome.AGENT_ERROR
    assert "before the episode was over" in left.detail


def test_an_episode_over_its_time_is_a_budget_outcome_and_scored(parrot: Any, renderer: Any) -> None:
    result, _ = play(
        Broken("nowhere"), parrot(lambda p, s: "x", delay=0.05), renderer, limits=EpisodeLimits(episode_timeout=0.2)
    )
    assert result.outcome is Outcome.EPISODE_TIMEOUT
    assert result.reward is not None


def test_a_timeout_that_the_agent_raises_is_the_agents(count_env: Any, parrot: Any, renderer: Any) -> None:
    class Impatient:
        async def run(self, episode: Episode) -> None:
            raise TimeoutError("my own")

    assert play(count_env(), parrot(lambda p, s: "x"), renderer, agent=Impatient())[0].outcome is Outcome.AGENT_ERROR


def test_a_truncated_turn_that_ends_the_episode_is_its_outcome(parrot: Any, renderer: Any) -> None:
    class Ends(Broken):
        def act(self, message: Any) -> Any:
            return "", 1.0, True, False, {}

    line = Session(parrot(lambda p, s: "a b c d e f g"), renderer, limits=SessionLimits(max_response_tokens=3))
    result = asyncio.run(Episode(Ends("nowhere"), TASK, line).play(ChatAgent(), seed=1))
    assert result.outcome is Outcome.RESPONSE_TRUNCATED
    assert result.reward == 1.0


def test_a_malformed_tool_call_ends_the_episode_where_the_environment_says_so(parrot: Any, renderer: Any) -> None:
    class Strict(Broken):
        on_malformed = "end"
        reward_range = (-2.0, 1.0)
        tools = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)

    result, session = play(Strict("nowhere"), parrot(lambda p, s: "<tool_call>oops</tool_call>"), renderer)
    assert result.outcome is Outcome.MALFORMED_ACTION
    assert result.reward == -2.0
    assert session.steps[-1].status == "malformed"


def test_an_unscorable_task_is_named(parrot: Any, renderer: Any) -> None:
    result, _ = play(Broken("begin", UnscorableTask("gold is empty")), parrot(lambda p, s: "x"), renderer)
    assert result.outcome is Outcome.ENV_ERROR
    assert result.detail == "unscorable task: gold is empty"


def test_wrapped_environments_are_played_through_their_wrapper(
    count_env: Any, parrot: Any, renderer: Any, counts: Any
) -> None:
    env = gymnasium.wrappers.TransformReward(count_env(), lambda reward: 10 * reward)
    result, session = play(env, parrot(counts), renderer)
    assert result.reward == pytest.approx(7.5)
    assert [step.reward for step in session.steps] == [2.5] * 3
    poisoned = gymnasium.wrappers.TransformReward(count_env(), lambda reward: float("nan"))
    assert play(poisoned, parrot(counts), renderer)[0].outcome is Outcome.ENV_ERROR


def test_cancelling_an_episode_closes_its_environment(parrot: Any, renderer: Any) -> None:
    env = Broken("nowhere")
    closed = closing(env)

    async def run() -> None:
        line = Session(parrot(lambda p, s: "x", delay=10), renderer)
        playing = asyncio.create_task(Episode(env, TASK, line).play(ChatAgent(), seed=1))
        await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(run())
    assert closed == [True]
