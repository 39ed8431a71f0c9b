"""Replay: equal where the environment is deterministic, and every planted change is found where it was planted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepgym.env.messages import user
from stepgym.errors import UserError
from stepgym.inspect.replay import count_replayable, replay
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.rollouts import RolloutConfig, rollout

# ---- nothing differs ------------------------------------------------------------------------------------------------


def test_tools_answer_the_same_again(games: Any, record: Callable[..., Path]) -> None:
    result = replay(record(games.Guess))
    assert (result.played, result.equal, result.exit_code) == (6, 6, 0)
    assert result.differences == ()
    assert result.complete
    with TrajectoryStore(result.path) as store:
        assert result.turns == result.observations == sum(len(trajectory.steps) for trajectory in store) > 30


@pytest.mark.parametrize("turns", ["conversation", "continue"])
@pytest.mark.parametrize("expert", [True, False], ids=["expert", "tiny model"])
def test_sql_answers_the_same_again(expert: bool, turns: Any, tmp_path: Path) -> None:
    import torch

    from stepgym.model.engines.transformers import TransformersEngine
    from stepgym.model.tiny import build_tiny_model
    from stepgym.run.env_source import EnvSource

    torch.set_num_threads(1)
    source = EnvSource.of("sql", instructions="none", observation_format="brief", show_schema=False, max_turns=4)
    tasks = source.make().unwrapped.tasks("train")[:12]  # type: ignore[attr-defined]
    corpus = ["<sql>SELECT name FROM people WHERE age > 12</sql> <solution>3</solution>"] * 40
    model, tokenizer = build_tiny_model(corpus, width=32, layers=1, heads=2, special_tokens=["<sql>", "</sql>"])
    engine = None if expert else TransformersEngine.wrap(model, tokenizer, name="tiny", context_length=1600)
    config = RolloutConfig(samples=2, max_response_tokens=400 if expert else 40)
    with TrajectoryStore(tmp_path, "a") as store:
        options: dict[str, Any] = {"config": config, "store": store, "renderer": Renderer(tokenizer, turns=turns)}
        rollout(source, tasks, engine, expert={} if expert else None, **options)
    result = replay(tmp_path)
    assert (result.played, result.differences, result.exit_code) == (24, (), 0)
    assert result.turns >= 48


def test_a_seeded_environment_is_seeded_again(games: Any, record: Callable[..., Path]) -> None:
    result = replay(record(games.Dice))
    assert (result.equal, result.exit_code, result.turns) == (6, 0, 18)


def test_a_wrapped_environment_is_made_by_its_function(games: Any, record: Callable[..., Path]) -> None:
    folder = record(games.counted)
    assert replay(folder).exit_code == 0
    assert replay(folder, env=games.counted).equal == 6
    unwrapped = replay(folder, env=games.Dice)
    assert {d.what for d in unwrapped.differences} == {"observation"}
    assert "(2 messages recorded, 1 message replayed)" not in unwrapped.differences[0].diff
    assert unwrapped.differences[0].diff == "[-2 messages-]{+1 message+}"


# ---- something differs ----------------------------------------------------------------------------------------------


def test_chance_without_a_seed_is_found(games: Any, record: Callable[..., Path]) -> None:
    result = replay(record(games.Dice, env_config={"seeded": False}))
    assert (result.played, result.equal, result.exit_code) == (6, 0, 1)
    assert len([d for d in result.differences if d.what == "observation"]) == 12  # no step saw the third answer
    assert len([d for d in result.differences if d.what == "reward"]) == 18
    first = result.differences[0]
    assert (first.trajectory, first.turn, first.step, first.what) == ("rollout/0/17/0/0", 1, 0, "observation")
    assert first.diff.startswith("content: It fell [-0.")
    assert first.diff.endswith("(only numbers differ: a time, a duration, an address?)")
    assert first.recorded[0]["content"] != first.replayed[0]["content"]


@pytest.mark.parametrize("turn", [1, 3])
def test_a_planted_observation_is_found_where_it_is(games: Any, record: Callable[..., Path], turn: int) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        message = {**trajectory.steps[turn].new_messages[0], "content": "perhaps"}
        return games.with_step(trajectory, turn, new_messages=[message])

    result = replay(games.changed(record(games.Guess), games.only("rollout/0/36/1/0", plant)))
    assert games.where(result) == [("rollout/0/36/1/0", turn, turn - 1, "observation")]
    assert result.differences[0].diff.startswith("content: [-perhaps-]{+")
    assert (result.played, result.equal, result.exit_code) == (6, 5, 1)


def test_a_planted_first_message_is_found(games: Any, record: Callable[..., Path]) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        return games.with_step(trajectory, 0, new_messages=[user("Guess 1..1000.")])

    result = replay(games.changed(record(games.Guess), games.only("rollout/0/17/0/0", plant)))
    assert games.where(result) == [("rollout/0/17/0/0", 0, None, "observation")]
    assert (
        result.differences[0].diff
        == "content: Guess [-1..1000.-]{+1..100.+} (only numbers differ: a time, a duration, an address?)"
    )


def test_planted_rewards_are_found_where_they_are(games: Any, record: Callable[..., Path]) -> None:
    name = "rollout/0/17/0/0"
    folder = record(games.Guess)
    result = replay(games.changed(folder, games.only(name, lambda t: games.with_step(t, 1, reward=0.25))))
    assert games.where(result) == [(name, 2, 1, "reward")]
    assert (result.differences[0].recorded, result.differences[0].replayed) == (0.25, 0.0)
    result = replay(
        games.changed(folder.rename(folder.with_name("b")), games.only(name, lambda t: replace(t, reward=9.0)))
    )
    assert games.where(result) == [(name, None, None, "reward")]
    parts = {"won": 1.0, "polite": 0.125}
    result = replay(
        games.changed(
            folder.with_name("b").rename(folder.with_name("c")),
            games.only(name, lambda t: games.with_step(t, len(t.steps) - 1, reward_parts=parts)),
        )
    )
    assert [(d.turn is not None, d.what) for d in result.differences] == [(True, "reward_parts")]
    assert "[-0.125-]{+0.5+}" in result.differences[0].diff


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"success": False}, "success"),
        ({"outcome": Outcome.RESPONSE_TRUNCATED}, "outcome"),
        ({"tools": ()}, "tools"),
        ({"reward_parts": {"won": 1.0}}, "reward_parts"),
    ],
    ids=["success", "outcome", "tools", "reward_parts"],
)
def test_a_planted_end_is_found(games: Any, record: Callable[..., Path], fields: Mapping[str, Any], what: str) -> None:
    result = replay(games.changed(record(games.Guess), games.only("rollout/0/90/1/0", lambda t: replace(t, **fields))))
    assert games.where(result) == [("rollout/0/90/1/0", None, None, what)]


def test_an_action_error_that_was_none_is_found(games: Any, record: Callable[..., Path]) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        metrics = {name: value for name, value in trajectory.steps[0].metrics.items() if name != "action_error"}
        assert len(metrics) < len(trajectory.steps[0].metrics)  # 101 is too high to be true
        return games.with_step(trajectory, 0, metrics=metrics)

    result = replay(games.changed(record(games.Guess), games.only("rollout/0/17/0/0", plant)))
    assert games.where(result) == [("rollout/0/17/0/0", 1, 0, "action_error")]


def test_an_environment_that_scores_otherwise_today(
    moods: dict[str, Any], games: Any, record: Callable[..., Path]
) -> None:
    folder = record(games.Guess)
    moods["polite"] = 0.75
    result = replay(folder)
    assert result.exit_code == 1
    assert {d.what for d in result.differences} == {"reward", "reward_parts"}
    with TrajectoryStore(folder) as store:
        turns = {str(t.id): len(t.steps) for t in store}
    assert all(d.turn == turns[d.trajectory] for d in result.differences)


def test_an_episode_that_ends_sooner_or_later(games: Any, record: Callable[..., Path]) -> None:
    """The turn limit is the environment's config: with another one the same actions end elsewhere."""

    class Short(games.Dice):
        max_turns = 2

    class Long(games.Dice):
        max_turns = 5

    folder = record(games.Dice)
    sooner = replay(folder, env=Short, task="17")
    assert [(d.turn, d.what, d.diff) for d in sooner.differences] == [
        (2, "ended", "ends after turn 2, the record goes on")
    ] * 2
    later = replay(folder, env=Long, task="17")
    assert [(d.turn, d.what) for d in later.differences] == [(3, "ended")] * 2
    assert later.differences[0].recorded == "ends after turn 3 (turn_limit)"


# ---- what is asked for ----------------------------------------------------------------------------------------------


def test_filters_and_limits(games: Any, record: Callable[..., Path]) -> None:
    folder = record(games.Dice)
    assert replay(folder, task="36").played == 2
    assert replay(folder, task=["36", "17"], outcome="turn_limit", phase="rollout").played == 4
    assert replay(folder, limit=3, concurrency=1).played == 3
    assert count_replayable(folder, limit=3) == 3
    with pytest.raises(UserError, match="no trajectory fits; phases here: rollout; outcomes: turn_limit"):
        replay(folder, phase="train")
    with pytest.raises(UserError, match="unknown outcome 'turn-limit'; did you mean 'turn_limit'"):
        replay(folder, outcome="turn-limit")
    with pytest.raises(UserError, match="concurrency must be at least 1"):
        replay(folder, concurrency=0)


def test_runs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run"):
        replay(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a run's folder"):
        replay(tmp_path)
    (tmp_path / "trajectories").mkdir()
    with pytest.raises(UserError, match="no trajectories yet"):
        replay(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="this is a file"):
        replay(tmp_path / "file")


def test_a_folder_of_a_run_gives_its_time_limits(
    moods: dict[str, Any], games: Any, record: Callable[..., Path], tmp_path: Path
) -> None:
    folder = record(games.Guess)
    run = tmp_path / "run"
    run.mkdir()
    folder.rename(run / "trajectories")
    (run / "config.yaml").write_text("rollout: {step_timeout: 0.05}\n")
    moods["hangs"] = 5.0
    result = replay(run, limit=1)
    assert "within 0.05 s" in result.problems["failed"]["rollout/0/17/0/0"]


def test_the_result_is_json(games: Any, record: Callable[..., Path]) -> None:

    result = replay(games.changed(record(games.Dice), lambda t: replace(t, success=True)), limit=1)
    found = json.loads(json.dumps(result.to_dict()))
    assert found["differences"] == [
        {
            "trajectory": "rollout/0/17/0/0",
            "turn": None,
            "step": None,
            "what": "success",
            "recorded": True,
            "replayed": False,
            "diff": "[-true-]{+false+}",
        }
    ]
    assert (found["played"], found["equal"], found["complete"]) == (1, 0, True)


def test_a_step_by_hand_is_not_replayable(tmp_path: Path) -> None:

    with TrajectoryStore(tmp_path, "a") as store:
        steps = [Step(prompt_ids=[1], response_ids=[2])]
        store.append(Trajectory(id=TrajectoryId("train", 0, "t", 0), outcome=Outcome.COMPLETED, steps=steps))
    assert replay(tmp_path).exit_code == 3
