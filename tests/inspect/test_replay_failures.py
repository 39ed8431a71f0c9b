"""Replay: what cannot be replayed is named, failures are met again, ends that the loop made are made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepgym.env.messages import user
from stepgym.errors import EngineError
from stepgym.inspect.replay import count_replayable, replay
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import Outcome
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.episode import Episode, EpisodeLimits
from stepgym.run.rollouts import RolloutConfig

# ---- what cannot be replayed ----------------------------------------------------------------------------------------


class WithCritic:
    """An agent with a side conversation, a second thought, and an action that the model said before it."""

    async def run(self, episode: Episode) -> None:
        while not episode.done:
            message = await episode.session.chat(episode.messages, tools=episode.tools)
            await episode.session.chat([user(f"Is this good: {message['text']}?")])
            await episode.session.chat([*episode.messages, message, user("Are you sure?")], tools=episode.tools)
            await episode.step(message)


def test_side_conversations_are_not_played(games: Any, record: Callable[..., Path], renderer: Renderer) -> None:
    folder = record(
        games.Dice, games.Says(renderer, "one", "a critic", "sure", "two", "critical", "quite"), agent=WithCritic()
    )
    with TrajectoryStore(folder) as store:
        assert [len(trajectory.steps) for trajectory in store] == [9] * 6
        first = next(iter(store))
    assert [step.metrics.get("env_turn") for step in first.steps] == [1, None, None, 2, None, None, 3, None, None]
    result = replay(folder)
    assert (result.played, result.turns, result.differences) == (6, 18, ())
    assert result.observations == 18  # what the episode began with, and what the first two throws of each came to

    def plant(trajectory: Trajectory) -> Trajectory:
        return games.with_step(trajectory, 3, new_messages=[user("It never fell.")])

    found = replay(games.changed(folder, games.only("rollout/0/17/0/0", plant)))
    assert games.where(found) == [("rollout/0/17/0/0", 1, 0, "observation")]


class OfItsOwn:
    """An agent that acts with words of its own."""

    async def run(self, episode: Episode) -> None:
        while not episode.done:
            message = await episode.session.chat(episode.messages)
            await episode.step({"role": "assistant", "content": message["content"] + "!"})


def test_an_agent_with_words_of_its_own_is_not_replayable(
    games: Any, record: Callable[..., Path], renderer: Renderer
) -> None:
    result = replay(record(games.Dice, games.Says(renderer, "one"), agent=OfItsOwn()))
    assert (result.played, result.exit_code, result.complete) == (0, 3, False)
    assert len(result.problems["not_replayable"]) == 6
    assert "no step is noted as the environment's turn 1" in result.problems["not_replayable"]["rollout/0/17/0/0"]


def test_records_that_do_not_tell_are_not_replayable(games: Any, record: Callable[..., Path]) -> None:
    def forget(trajectory: Trajectory) -> Trajectory:
        if trajectory.id.sample:
            return replace(trajectory, metrics={})
        return {
            "17": lambda: games.with_step(trajectory, 1, metrics={"env_turn": 1.0}),
            "36": lambda: games.with_step(trajectory, 1, message=None),
            "90": lambda: replace(trajectory, seeds={}),
        }[trajectory.id.task_id]()

    result = replay(games.changed(record(games.Dice), forget))
    assert (result.played, result.exit_code) == (0, 3)
    reasons = result.problems["not_replayable"]
    assert reasons["rollout/0/17/1/0"] == "the record does not say how many turns the environment had"
    assert reasons["rollout/0/17/0/0"] == "two steps are noted as the environment's turn 1"
    assert reasons["rollout/0/36/0/0"] == "step 1 has no message"
    assert reasons["rollout/0/90/0/0"] == "the record has no environment seed or no task"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"env_id": "nowhere:Env"}, "there is no module 'nowhere'"),
        ({"env_id": "sql-v9"}, "unknown environment 'sql-v9'"),
        ({"env_id": ""}, "environment"),
        ({"env_config": {"seeds": 3}}, "unknown field 'seeds'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(
    games: Any, record: Callable[..., Path], fields: Mapping[str, Any], reason: str
) -> None:
    result = replay(games.changed(record(games.Dice), games.only("rollout/0/17/0/0", lambda t: replace(t, **fields))))
    assert (result.played, result.exit_code) == (5, 3)
    assert reason in result.problems["no_environment"]["rollout/0/17/0/0"]


def test_an_environment_that_breaks_or_hangs_today(
    moods: dict[str, Any], games: Any, record: Callable[..., Path]
) -> None:
    folder = record(games.Guess)
    moods["nailed shut"] = True
    result = replay(folder)
    assert (result.played, result.exit_code) == (0, 3)
    assert result.problems["failed"]["rollout/0/17/0/0"] == (
        "env_error after 0 turns: RuntimeError: this box is nailed shut"
    )
    moods.clear()
    moods["hangs"] = 5.0
    result = replay(folder, limits=EpisodeLimits(step_timeout=0.05), concurrency=2, limit=2)
    assert "env_timeout after 0 turns" in result.problems["failed"]["rollout/0/17/0/0"]
    assert len(result.problems["failed"]) == 2


# ---- failed attempts, and ends that the loop made -------------------------------------------------------------------


def test_failed_attempts_are_left_out_unless_asked_for(
    games: Any, record: Callable[..., Path], renderer: Renderer
) -> None:
    folder = record(games.Dice, games.Says(renderer, "one", "two", EngineError("gone")))
    left_out = replay(folder)
    assert (left_out.played, dict(left_out.skipped), left_out.exit_code) == (0, {"engine_error": 18}, 3)
    assert (count_replayable(folder), count_replayable(folder, attempts=True)) == (0, 18)
    result = replay(folder, attempts=True)
    assert (result.played, result.turns, result.exit_code) == (18, 36, 0)

    def plant(trajectory: Trajectory) -> Trajectory:
        return games.with_step(trajectory, 1, reward=0.75)

    found = replay(games.changed(folder, games.only("rollout/0/90/1/2", plant)), attempts=True)
    assert games.where(found) == [("rollout/0/90/1/2", 2, 1, "reward")]


def test_a_failure_of_the_environment_is_tried_again(
    moods: dict[str, Any], games: Any, record: Callable[..., Path]
) -> None:
    moods["broken"] = True
    folder = record(games.Guess)
    again = replay(folder, attempts=True)
    assert (again.played, again.equal, again.exit_code) == (18, 18, 0)  # it fails as it did
    moods.clear()
    healed = replay(folder, attempts=True, limit=1)
    assert games.where(healed) == [("rollout/0/17/0/0", 1, None, "outcome")]
    assert healed.differences[0].diff == "[-env_error: RuntimeError: the lid fell off-]{+no failure+}"


def test_a_failure_to_begin_is_tried_again(moods: dict[str, Any], games: Any, record: Callable[..., Path]) -> None:
    moods["nailed shut"] = True
    folder = record(games.Guess)
    assert replay(folder, attempts=True).exit_code == 0
    moods.clear()
    healed = replay(folder, attempts=True, limit=1)
    assert games.where(healed) == [("rollout/0/17/0/0", 0, None, "outcome")]


def test_a_context_that_ran_over_is_concluded_again(
    moods: dict[str, Any], games: Any, record: Callable[..., Path], renderer: Renderer
) -> None:
    long = " ".join(["throw"] * 40)
    room = len(renderer.prompt([user("Guess 1..100.")], games.Guess.tools).new_ids) + 20
    folder = record(
        games.Guess, games.Says(renderer, long, context_length=room), config=RolloutConfig(max_response_tokens=400)
    )
    with TrajectoryStore(folder) as store:
        assert {(t.outcome, t.reward, len(t.steps)) for t in store} == {(Outcome.CONTEXT_OVERFLOW, 0.5, 1)}
    assert replay(folder).exit_code == 0
    moods["polite"] = 0.25
    result = replay(folder)
    assert {(d.what, d.turn) for d in result.differences} == {("reward", None), ("reward_parts", None)}
    assert len(result.differences) == 6
    assert all(d.step == 0 for d in result.differences)


def test_an_episode_whose_time_ran_out_is_concluded_again(games: Any, record: Callable[..., Path]) -> None:
    def late(trajectory: Trajectory) -> Trajectory:
        """As if the time had run out while the model said its third turn: two throws stand, and `conclude` gave 0."""
        reward = sum(step.reward for step in trajectory.steps[:2])
        fields: dict[str, Any] = {"steps": trajectory.steps[:2], "metrics": {"turns": 2.0}, "reward": reward}
        return replace(trajectory, outcome=Outcome.EPISODE_TIMEOUT, success=False, **fields)

    folder = games.changed(record(games.Dice), late)
    result = replay(folder)
    assert (result.equal, result.turns, result.exit_code) == (6, 12, 0)

    def acting(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, metrics={"turns": 1.0})

    result = replay(games.changed(folder, acting))
    assert len(result.problems["not_replayable"]) == 6
    assert "while the environment was answering" in result.problems["not_replayable"]["rollout/0/17/0/0"]
