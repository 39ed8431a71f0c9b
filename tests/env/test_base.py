from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check

from stepgym import ActionError, Env, Task
from stepgym.env.messages import Message
from stepgym.errors import EnvError, UserError
from stepgym.record.outcome import Outcome


class Echo(Env):
    """Repeats what it is told; `act` returns whatever the test put into `answer`."""

    max_turns = 3
    reward_range = (-1.0, 2.0)

    def __init__(self, *, words: tuple[str, ...] = ("a", "b"), answer: Any = None) -> None:
        self.words = words
        self.answer = answer

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self.splits:
            raise UserError(f"no split {split!r}")
        return [Task(id=f"{split}-{word}", prompt=word) for word in self.words]

    def act(self, message: Message) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        return message["text"], 0.5, message["text"] == "bye", False, {}

    def conclude(self, outcome: Outcome) -> Any:
        return {"late": 1.0}


class AsyncEcho(Echo):
    async def begin(self, task: Task) -> str:
        await asyncio.sleep(0)
        return task.prompt

    async def act(self, message: Message) -> Any:
        await asyncio.sleep(0)
        return super().act(message)

    async def conclude(self, outcome: Outcome) -> float:
        return 1.0


@pytest.mark.parametrize("cls", [Echo, AsyncEcho])
def test_gymnasiums_checker_passes(cls: type[Env]) -> None:
    gymnasium_check(cls(), skip_render_check=True)


@pytest.mark.parametrize("cls", [Echo, AsyncEcho])
def test_an_episode_ends_at_max_turns_and_is_concluded(cls: type[Env]) -> None:
    env = cls()
    env.reset(seed=0)
    assert [env.step("x")[2:4] for _ in range(2)] == [(False, False), (False, False)]
    assert env.turns_left == 1
    _, reward, terminated, truncated, info = env.step("x")
    assert (reward, terminated, truncated) == (1.5, False, True)
    assert info["turn_limit"] is True
    assert info["success"] is True
    with pytest.raises(ResetNeeded):
        env.step("x")


def test_async_and_sync_calls_mix_inside_a_running_loop() -> None:
    async def play() -> list[Any]:
        env = AsyncEcho()
        env.reset(seed=0)
        inner = env.step("x")
        await env.areset(seed=0)
        return [inner, await env.astep("x")]

    one, two = asyncio.run(play())
    assert one == two


def test_an_environment_may_play_another_one() -> None:
    class Outer(AsyncEcho):
        async def act(self, message: Message) -> Any:
            inner = AsyncEcho()
            inner.reset(seed=0)
            return inner.step(message)

    env = Outer()
    env.reset(seed=0)
    assert env.step("bye")[2] is True


def test_a_sync_hook_may_return_what_an_async_one_above_it_does() -> None:
    class Under(AsyncEcho):
        def begin(self, task: Task) -> Any:  # type: ignore[override]
            return super().begin(task)

    assert Under(words=("hello",)).reset(seed=0)[0] == [{"role": "user", "content": "hello"}]


def test_the_seed_draws_the_task_and_options_choose_it() -> None:
    env = Echo(words=tuple("abcdefgh"))
    drawn = [env.reset(seed=5)[1]["task_id"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert {env.reset(seed=seed)[1]["task_id"] for seed in range(40)} == {f"train-{word}" for word in "abcdefgh"}
    assert env.reset(seed=5, options={"split": "test"})[1]["task_id"].startswith("test-")
    env.reset(options={"task": Task(id="mine", prompt="p")})
    assert env.task.id == "mine"
    env.reset(options={"task": {"id": 7, "prompt": "a row"}})
    assert env.task == Task(id="7", prompt="a row")


def test_bad_options_and_splits_are_the_users() -> None:
    with pytest.raises(UserError, match="unknown option 'tsk'"):
        Echo().reset(options={"tsk": 1})
    with pytest.raises(UserError, match="no split 'dev'"):
        Echo().reset(options={"split": "dev"})
    with pytest.raises(UserError, match="has no tasks"):
        Echo(words=()).reset()
    with pytest.raises(ResetNeeded):
        _ = Echo().task


def test_an_action_error_is_an_observation_that_costs_a_turn() -> None:
    env = Echo(answer=ActionError("no action", status="no_action"))
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("x")
    assert observation == [{"role": "user", "content": "Error: no action"}]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"action_error": "no action", "action_status": "no_action"}
    assert env.turns_left == 2


@pytest.mark.parametrize(
    "answer",
    [
        "not a tuple",
        ([], 0.0, False, False),
        ([], "much", False, False, {}),
        ([], float("nan"), False, False, {}),
        ([], float("inf"), False, False, {}),
        ([], 0.0, False, False, 5),
        (5, 0.0, False, False, {}),
        (["text"], 0.0, False, False, {}),
        ({"a"}, 0.0, False, False, {}),
    ],
)
def test_what_act_returns_wrongly_is_the_environments_fault(answer: Any) -> None:
    env = Echo(answer=answer)
    env.reset(seed=0)
    with pytest.raises(EnvError) as caught:
        env.step("x")
    assert "\n" not in str(caught.value)


def test_other_exceptions_pass_through_as_they_are() -> None:
    env = Echo(answer=ZeroDivisionError("oops"))
    env.reset(seed=0)
    with pytest.raises(ZeroDivisionError, match="oops"):
        env.step("x")


@pytest.mark.parametrize(
    "answer", [("text", 0.5, 0, np.bool_(False), None), ("text", np.float32(0.5), False, False, {})]
)
def test_numbers_and_flags_of_numpy_are_taken(answer: Any) -> None:
    env = Echo(answer=answer)
    env.reset(seed=0)
    assert env.step("x") == ([{"role": "user", "content": "text"}], 0.5, False, False, {})


def test_the_config_has_the_defaults_and_what_was_given() -> None:
    class More(Echo):
        def __init__(self, *, extra: int = 1, **rest: Any) -> None:
            super().__init__(**rest)
            self.extra = extra

    assert Echo(words=("z",)).config == {"words": ("z",), "answer": None}
    assert More(answer=3).config == {"extra": 1, "words": ("a", "b"), "answer": 3}


def test_state_is_not_shared_between_environments() -> None:
    one, two = Echo(), Echo()
    one.reset(seed=0)
    assert one.action_space is not two.action_space
    with pytest.raises(ResetNeeded):
        two.step("x")
    twin = copy.deepcopy(one)
    twin.step("bye")
    assert one.step("x")[2] is False


def test_wrappers_and_vector_environments_run_it() -> None:
    class Loud(gymnasium.ActionWrapper):  # type: ignore[type-arg]
        def action(self, action: Any) -> Any:
            return "bye"

    env = Loud(Echo())
    env.reset(seed=0)
    assert env.step("x")[2] is True
    assert env.get_wrapper_attr("max_turns") == 3
    for vector in (
        gymnasium.vector.SyncVectorEnv([Echo, Echo]),
        # Forks this process, which has threads and a loop: the children must not wait for those.
        gymnasium.vector.AsyncVectorEnv([Echo, AsyncEcho], shared_memory=False, context="fork"),
    ):
        observations, _ = vector.reset(seed=0)
        assert len(observations) == 2
        _, rewards, terminated, _, _ = vector.step(("bye", "x"))
        assert list(rewards) == [0.5, 0.5]
        assert list(terminated) == [True, False]
        vector.close()
