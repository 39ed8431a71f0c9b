"""Replay: equal where the environment is deterministic, and every planted change is found where it was planted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from stepgym.env.base import Env
from stepgym.env.messages import Message, tool_call, user
from stepgym.env.task import Task
from stepgym.env.tool_env import ToolEnv
from stepgym.env.tools import tool
from stepgym.errors import ActionError, EngineError, UserError
from stepgym.inspect.replay import Replay, count_replayable, replay
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.outcome import Outcome, OutcomePolicy
from stepgym.record.step import Ids, Sampling, Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.episode import Episode, EpisodeLimits
from stepgym.run.rollouts import RolloutConfig, rollout

TASKS = [Task(id=str(n), prompt="Guess 1..100.", answer=n) for n in (17, 36, 90)]
moods: dict[str, Any] = {}
"""What the environments below do otherwise than when they were recorded."""


class Guess(ToolEnv):
    """A number is guessed with a tool. Deterministic, with parts."""

    max_turns = 9
    reward_range = (0.0, 2.0)

    def begin(self, task: Task) -> Any:
        if moods.get("nailed shut"):
            raise RuntimeError("this box is nailed shut")
        self.won, self.low, self.high = False, 1, 100
        return super().begin(task)

    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        if moods.get("hangs"):
            time.sleep(moods["hangs"])
        if moods.get("broken"):
            raise RuntimeError("the lid fell off")
        if number > 100:
            raise ActionError("too high to be true")
        self.won = number == self.task.answer
        return "right" if self.won else "low" if number < self.task.answer else "high"

    @tool
    def give_up(self) -> str:
        """End it."""
        self.finish()
        return "a pity"

    def score(self) -> dict[str, float]:
        return {"won": float(self.won), "polite": moods.get("polite", 0.5)}

    def expert(self, task: Task) -> Iterator[Message | str]:
        yield tool_call("guess", number=101)
        low, high = 1, 100
        while True:
            number = (low + high) // 2
            yield tool_call("guess", number=number)
            low, high = (number + 1, high) if number < task.answer else (low, number)
            if self.won:
                yield "Done."


class Dice(Env):
    """Three throws, from the episode's seed or from chance alone; each says how it fell."""

    max_turns = 3

    def __init__(self, *, seeded: bool = True) -> None:
        self.seeded = seeded

    def begin(self, task: Task) -> Any:
        return [user("Throw.")]

    def act(self, message: Message) -> Any:
        dice = self.np_random if self.seeded else np.random.default_rng()
        thrown = float(dice.random())
        return [user(f"It fell {thrown:.12f} far.")], thrown / 3, False, False, {}

    def expert(self, task: Task) -> Iterator[str]:
        yield from itertools.repeat("throw")


class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that says in each answer how many turns there were."""

    turns = 0

    def step(self, action: Any) -> Any:
        self.turns += 1
        observation, *rest = self.env.step(action)
        return [*observation, user(f"turn {self.turns}")], *rest


def counted() -> Any:
    return Counted(Dice())


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    moods.clear()
    yield
    moods.clear()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    texts = [f'{{"name": "guess", "arguments": {{"number": {n}}}}} Throw. It fell far. Done.' for n in range(101)]
    return Renderer(build_tiny_tokenizer(texts * 3))


@pytest.fixture
def record(renderer: Renderer, tmp_path: Path) -> Callable[..., Path]:
    """Play into a store and return its folder."""

    def play(env: Any, engine: Engine | None = None, **options: Any) -> Path:
        config = options.pop("config", RolloutConfig(samples=2, max_response_tokens=200))
        options.setdefault("policy", OutcomePolicy(max_infrastructure_share=1.0))
        if engine is None:
            options["expert"] = {}
        with TrajectoryStore(tmp_path / "store", "a") as store:
            rollout(env, TASKS, engine, renderer=renderer, config=config, store=store, **options)
        return tmp_path / "store"

    return play


def changed(folder: Path, change: Callable[[Trajectory], Trajectory]) -> Path:
    """A copy of a store in which every trajectory went through `change`."""
    copy = folder.with_name(f"{folder.name}-changed")
    with TrajectoryStore(folder) as old, TrajectoryStore(copy, "a") as new:
        for trajectory in old:
            new.append(change(trajectory))
    return copy


def with_step(trajectory: Trajectory, index: int, **fields: Any) -> Trajectory:
    steps = list(trajectory.steps)
    steps[index] = replace(steps[index], **fields)
    return replace(trajectory, steps=steps)


def only(name: str, change: Callable[[Trajectory], Trajectory]) -> Callable[[Trajectory], Trajectory]:
    return lambda trajectory: change(trajectory) if str(trajectory.id) == name else trajectory


def where(result: Replay) -> list[tuple[str, int | None, int | None, str]]:
    return [(d.trajectory, d.turn, d.step, d.what) for d in result.differences]


# ---- nothing differs ------------------------------------------------------------------------------------------------


def test_tools_answer_the_same_again(record: Callable[..., Path]) -> None:
    result = replay(record(Guess))
    assert (result.played, result.equal, result.exit_code) == (6, 6, 0)
    assert result.differences == ()
    assert result.complete
    with TrajectoryStore(result.path) as store:
        assert result.turns == result.observations == sum(len(trajectory.steps) for trajectory in store) > 30


@pytest.mark.parametrize("expert", [True, False], ids=["expert", "tiny model"])
def test_sql_answers_the_same_again(expert: bool, tmp_path: Path) -> None:
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
        options: dict[str, Any] = {"config": config, "store": store, "renderer": Renderer(tokenizer)}
        rollout(source, tasks, engine, expert={} if expert else None, **options)
    result = replay(tmp_path)
    assert (result.played, result.differences, result.exit_code) == (24, (), 0)
    assert result.turns >= 48


def test_a_seeded_environment_is_seeded_again(record: Callable[..., Path]) -> None:
    result = replay(record(Dice))
    assert (result.equal, result.exit_code, result.turns) == (6, 0, 18)


def test_a_wrapped_environment_is_made_by_its_function(record: Callable[..., Path]) -> None:
    folder = record(counted)
    assert replay(folder).exit_code == 0
    assert replay(folder, env=counted).equal == 6
    unwrapped = replay(folder, env=Dice)
    assert {d.what for d in unwrapped.differences} == {"observation"}
    assert "(2 messages recorded, 1 message replayed)" not in unwrapped.differences[0].diff
    assert unwrapped.differences[0].diff == "[-2 messages-]{+1 message+}"


# ---- something differs ----------------------------------------------------------------------------------------------


def test_chance_without_a_seed_is_found(record: Callable[..., Path]) -> None:
    result = replay(record(Dice, env_config={"seeded": False}))
    assert (result.played, result.equal, result.exit_code) == (6, 0, 1)
    assert len([d for d in result.differences if d.what == "observation"]) == 12  # no step saw the third answer
    assert len([d for d in result.differences if d.what == "reward"]) == 18
    first = result.differences[0]
    assert (first.trajectory, first.turn, first.step, first.what) == ("rollout/0/17/0/0", 1, 0, "observation")
    assert first.diff.startswith("content: It fell [-0.")
    assert first.diff.endswith("(only numbers differ: a time, a duration, an address?)")
    assert first.recorded[0]["content"] != first.replayed[0]["content"]


@pytest.mark.parametrize("turn", [1, 3])
def test_a_planted_observation_is_found_where_it_is(record: Callable[..., Path], turn: int) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        message = {**trajectory.steps[turn].new_messages[0], "content": "perhaps"}
        return with_step(trajectory, turn, new_messages=[message])

    result = replay(changed(record(Guess), only("rollout/0/36/1/0", plant)))
    assert where(result) == [("rollout/0/36/1/0", turn, turn - 1, "observation")]
    assert result.differences[0].diff.startswith("content: [-perhaps-]{+")
    assert (result.played, result.equal, result.exit_code) == (6, 5, 1)


def test_a_planted_first_message_is_found(record: Callable[..., Path]) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        return with_step(trajectory, 0, new_messages=[user("Guess 1..1000.")])

    result = replay(changed(record(Guess), only("rollout/0/17/0/0", plant)))
    assert where(result) == [("rollout/0/17/0/0", 0, None, "observation")]
    assert (
        result.differences[0].diff
        == "content: Guess [-1..1000.-]{+1..100.+} (only numbers differ: a time, a duration, an address?)"
    )


def test_planted_rewards_are_found_where_they_are(record: Callable[..., Path]) -> None:
    name = "rollout/0/17/0/0"
    folder = record(Guess)
    result = replay(changed(folder, only(name, lambda t: with_step(t, 1, reward=0.25))))
    assert where(result) == [(name, 2, 1, "reward")]
    assert (result.differences[0].recorded, result.differences[0].replayed) == (0.25, 0.0)
    result = replay(changed(folder.rename(folder.with_name("b")), only(name, lambda t: replace(t, reward=9.0))))
    assert where(result) == [(name, None, None, "reward")]
    parts = {"won": 1.0, "polite": 0.125}
    result = replay(
        changed(
            folder.with_name("b").rename(folder.with_name("c")),
            only(name, lambda t: with_step(t, len(t.steps) - 1, reward_parts=parts)),
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
def test_a_planted_end_is_found(record: Callable[..., Path], fields: Mapping[str, Any], what: str) -> None:
    result = replay(changed(record(Guess), only("rollout/0/90/1/0", lambda t: replace(t, **fields))))
    assert where(result) == [("rollout/0/90/1/0", None, None, what)]


def test_an_action_error_that_was_none_is_found(record: Callable[..., Path]) -> None:
    def plant(trajectory: Trajectory) -> Trajectory:
        metrics = {name: value for name, value in trajectory.steps[0].metrics.items() if name != "action_error"}
        assert len(metrics) < len(trajectory.steps[0].metrics)  # 101 is too high to be true
        return with_step(trajectory, 0, metrics=metrics)

    result = replay(changed(record(Guess), only("rollout/0/17/0/0", plant)))
    assert where(result) == [("rollout/0/17/0/0", 1, 0, "action_error")]


def test_an_environment_that_scores_otherwise_today(record: Callable[..., Path]) -> None:
    folder = record(Guess)
    moods["polite"] = 0.75
    result = replay(folder)
    assert result.exit_code == 1
    assert {d.what for d in result.differences} == {"reward", "reward_parts"}
    with TrajectoryStore(folder) as store:
        turns = {str(t.id): len(t.steps) for t in store}
    assert all(d.turn == turns[d.trajectory] for d in result.differences)


def test_an_episode_that_ends_sooner_or_later(record: Callable[..., Path]) -> None:
    """The turn limit is the environment's config: with another one the same actions end elsewhere."""

    class Short(Dice):
        max_turns = 2

    class Long(Dice):
        max_turns = 5

    folder = record(Dice)
    sooner = replay(folder, env=Short, task="17")
    assert [(d.turn, d.what, d.diff) for d in sooner.differences] == [
        (2, "ended", "ends after turn 2, the record goes on")
    ] * 2
    later = replay(folder, env=Long, task="17")
    assert [(d.turn, d.what) for d in later.differences] == [(3, "ended")] * 2
    assert later.differences[0].recorded == "ends after turn 3 (turn_limit)"


# ---- what cannot be replayed ----------------------------------------------------------------------------------------


class Says(Engine):
    """An engine that says what it is told to, one text for each call."""

    kind = "says"
    model = "says"

    def __init__(self, renderer: Renderer, *texts: str | Exception, context_length: int | None = None) -> None:
        self._renderer = renderer
        self._texts = texts
        self.context_length = context_length
        self.calls = itertools.count()

    @property
    def tokenizer(self) -> Any:
        return self._renderer.tokenizer

    def for_episode(self) -> Engine:
        return Says(self._renderer, *self._texts, context_length=self.context_length)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        text = self._texts[min(next(self.calls), len(self._texts) - 1)]
        if isinstance(text, Exception):
            raise text
        ids = self._renderer.encode_response([], text)
        reason = "stop" if len(ids) <= max_tokens else "length"
        return Completion(ids[:max_tokens], np.full(len(ids[:max_tokens]), -0.5, dtype=np.float32), reason)


class WithCritic:
    """An agent with a side conversation, a second thought, and an action that the model said before it."""

    async def run(self, episode: Episode) -> None:
        while not episode.done:
            message = await episode.session.chat(episode.messages, tools=episode.tools)
            await episode.session.chat([user(f"Is this good: {message['text']}?")])
            await episode.session.chat([*episode.messages, message, user("Are you sure?")], tools=episode.tools)
            await episode.step(message)


def test_side_conversations_are_not_played(record: Callable[..., Path], renderer: Renderer) -> None:
    folder = record(Dice, Says(renderer, "one", "a critic", "sure", "two", "critical", "quite"), agent=WithCritic())
    with TrajectoryStore(folder) as store:
        assert [len(trajectory.steps) for trajectory in store] == [9] * 6
        first = next(iter(store))
    assert [step.metrics.get("env_turn") for step in first.steps] == [1, None, None, 2, None, None, 3, None, None]
    result = replay(folder)
    assert (result.played, result.turns, result.differences) == (6, 18, ())
    assert result.observations == 18  # what the episode began with, and what the first two throws of each came to

    def plant(trajectory: Trajectory) -> Trajectory:
        return with_step(trajectory, 3, new_messages=[user("It never fell.")])

    found = replay(changed(folder, only("rollout/0/17/0/0", plant)))
    assert where(found) == [("rollout/0/17/0/0", 1, 0, "observation")]


class OfItsOwn:
    """An agent that acts with words of its own."""

    async def run(self, episode: Episode) -> None:
        while not episode.done:
            message = await episode.session.chat(episode.messages)
            await episode.step({"role": "assistant", "content": message["content"] + "!"})


def test_an_agent_with_words_of_its_own_is_not_replayable(record: Callable[..., Path], renderer: Renderer) -> None:
    result = replay(record(Dice, Says(renderer, "one"), agent=OfItsOwn()))
    assert (result.played, result.exit_code, result.complete) == (0, 3, False)
    assert len(result.problems["not_replayable"]) == 6
    assert "no step is noted as the environment's turn 1" in result.problems["not_replayable"]["rollout/0/17/0/0"]


def test_records_that_do_not_tell_are_not_replayable(record: Callable[..., Path]) -> None:
    def forget(trajectory: Trajectory) -> Trajectory:
        if trajectory.id.sample:
            return replace(trajectory, metrics={})
        return {
            "17": lambda: with_step(trajectory, 1, metrics={"env_turn": 1.0}),
            "36": lambda: with_step(trajectory, 1, message=None),
            "90": lambda: replace(trajectory, seeds={}),
        }[trajectory.id.task_id]()

    result = replay(changed(record(Dice), forget))
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
    record: Callable[..., Path], fields: Mapping[str, Any], reason: str
) -> None:
    result = replay(changed(record(Dice), only("rollout/0/17/0/0", lambda t: replace(t, **fields))))
    assert (result.played, result.exit_code) == (5, 3)
    assert reason in result.problems["no_environment"]["rollout/0/17/0/0"]


def test_an_environment_that_breaks_or_hangs_today(record: Callable[..., Path]) -> None:
    folder = record(Guess)
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


def test_failed_attempts_are_left_out_unless_asked_for(record: Callable[..., Path], renderer: Renderer) -> None:
    folder = record(Dice, Says(renderer, "one", "two", EngineError("gone")))
    left_out = replay(folder)
    assert (left_out.played, dict(left_out.skipped), left_out.exit_code) == (0, {"engine_error": 18}, 3)
    assert (count_replayable(folder), count_replayable(folder, attempts=True)) == (0, 18)
    result = replay(folder, attempts=True)
    assert (result.played, result.turns, result.exit_code) == (18, 36, 0)

    def plant(trajectory: Trajectory) -> Trajectory:
        return with_step(trajectory, 1, reward=0.75)

    found = replay(changed(folder, only("rollout/0/90/1/2", plant)), attempts=True)
    assert where(found) == [("rollout/0/90/1/2", 2, 1, "reward")]


def test_a_failure_of_the_environment_is_tried_again(record: Callable[..., Path]) -> None:
    moods["broken"] = True
    folder = record(Guess)
    again = replay(folder, attempts=True)
    assert (again.played, again.equal, again.exit_code) == (18, 18, 0)  # it fails as it did
    moods.clear()
    healed = replay(folder, attempts=True, limit=1)
    assert where(healed) == [("rollout/0/17/0/0", 1, None, "outcome")]
    assert healed.differences[0].diff == "[-env_error: RuntimeError: the lid fell off-]{+no failure+}"


def test_a_failure_to_begin_is_tried_again(record: Callable[..., Path]) -> None:
    moods["nailed shut"] = True
    folder = record(Guess)
    assert replay(folder, attempts=True).exit_code == 0
    moods.clear()
    healed = replay(folder, attempts=True, limit=1)
    assert where(healed) == [("rollout/0/17/0/0", 0, None, "outcome")]


def test_a_context_that_ran_over_is_concluded_again(record: Callable[..., Path], renderer: Renderer) -> None:
    long = " ".join(["throw"] * 40)
    room = len(renderer.prompt([user("Guess 1..100.")], Guess.tools).new_ids) + 20
    folder = record(Guess, Says(renderer, long, context_length=room), config=RolloutConfig(max_response_tokens=400))
    with TrajectoryStore(folder) as store:
        assert {(t.outcome, t.reward, len(t.steps)) for t in store} == {(Outcome.CONTEXT_OVERFLOW, 0.5, 1)}
    assert replay(folder).exit_code == 0
    moods["polite"] = 0.25
    result = replay(folder)
    assert {(d.what, d.turn) for d in result.differences} == {("reward", None), ("reward_parts", None)}
    assert len(result.differences) == 6
    assert all(d.step == 0 for d in result.differences)


def test_an_episode_whose_time_ran_out_is_concluded_again(record: Callable[..., Path]) -> None:
    def late(trajectory: Trajectory) -> Trajectory:
        """As if the time had run out while the model said its third turn: two throws stand, and `conclude` gave 0."""
        reward = sum(step.reward for step in trajectory.steps[:2])
        fields: dict[str, Any] = {"steps": trajectory.steps[:2], "metrics": {"turns": 2.0}, "reward": reward}
        return replace(trajectory, outcome=Outcome.EPISODE_TIMEOUT, success=False, **fields)

    folder = changed(record(Dice), late)
    result = replay(folder)
    assert (result.equal, result.turns, result.exit_code) == (6, 12, 0)

    def acting(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, metrics={"turns": 1.0})

    result = replay(changed(folder, acting))
    assert len(result.problems["not_replayable"]) == 6
    assert "while the environment was answering" in result.problems["not_replayable"]["rollout/0/17/0/0"]


# ---- what is asked for ----------------------------------------------------------------------------------------------


def test_filters_and_limits(record: Callable[..., Path]) -> None:
    folder = record(Dice)
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


def test_a_folder_of_a_run_gives_its_time_limits(record: Callable[..., Path], tmp_path: Path) -> None:
    folder = record(Guess)
    run = tmp_path / "run"
    run.mkdir()
    folder.rename(run / "trajectories")
    (run / "config.yaml").write_text("rollout: {step_timeout: 0.05}\n")
    moods["hangs"] = 5.0
    result = replay(run, limit=1)
    assert "within 0.05 s" in result.problems["failed"]["rollout/0/17/0/0"]


def test_the_result_is_json(record: Callable[..., Path]) -> None:
    import json

    result = replay(changed(record(Dice), lambda t: replace(t, success=True)), limit=1)
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
    from stepgym.record.trajectory import TrajectoryId

    with TrajectoryStore(tmp_path, "a") as store:
        steps = [Step(prompt_ids=[1], response_ids=[2])]
        store.append(Trajectory(id=TrajectoryId("train", 0, "t", 0), outcome=Outcome.COMPLETED, steps=steps))
    assert replay(tmp_path).exit_code == 3
