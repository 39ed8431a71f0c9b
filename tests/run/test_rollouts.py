"""Many episodes: bounded, retried by the policy, recorded once, resumed; one failure never ends the run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.errors import EngineError, UnscorableTask, UserError
from stepgym.model.engines.chat import OpenAIChatEngine
from stepgym.model.renderer import Renderer
from stepgym.record.outcome import Outcome, OutcomePolicy, Treatment
from stepgym.record.store import TrajectoryStore
from stepgym.run.rollouts import RolloutConfig, RunStoppedError, rollout, rollout_stream
from stepgym.run.tally import Tally

TASKS = [Task(id=f"t{n}", prompt="Count.") for n in range(6)]


def test_every_sample_of_every_task_is_played_once_in_order(count_env: Any, parrot: Any, counts: Any) -> None:
    tally = Tally()
    found = rollout(count_env, TASKS, parrot(counts), config=RolloutConfig(samples=3), tally=tally)
    assert [(t.id.task_id, t.id.sample) for t in found] == [(task.id, n) for task in TASKS for n in range(3)]
    assert all(t.outcome is Outcome.COMPLETED and t.final and t.success for t in found)
    assert tally.episodes == tally.planned == 18
    assert tally.mean_reward == pytest.approx(0.75)
    by_group = Counter(t.seeds["env"] for t in found)
    assert sorted(by_group.values()) == [3] * 6
    assert len({t.seeds["sampler"] for t in found}) == 18
    assert found[0].env_config == {"goal": 3}
    assert found[0].provenance["model"] == "parrot"


def test_no_more_episodes_at_once_than_allowed(count_env: Any, parrot: Any, counts: Any) -> None:
    open_now, most = [0], [0]

    class Watched(count_env):  # type: ignore[misc]
        def begin(self, task: Task) -> Any:
            open_now[0] += 1
            most[0] = max(most[0], open_now[0])
            return super().begin(task)

        def close(self) -> None:
            open_now[0] -= 1

    rollout(Watched, TASKS, parrot(counts, delay=0.005), config=RolloutConfig(samples=4, concurrency=5))
    assert most[0] <= 5
    assert open_now[0] == -1  # the one that was made to look at was closed without a begin


class Flaky(Env):
    """Fails its first `failures` episodes of every task, by class variable."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self, *, failures: int = 1) -> None:
        self.failures = failures

    def act(self, message: Any) -> Any:
        Flaky.seen[self.task.id] += 1
        if Flaky.seen[self.task.id] <= self.failures:
            raise RuntimeError("the database went away")
        return "", 1.0, True, False, {}


def test_environment_faults_are_retried_and_every_attempt_is_kept(parrot: Any, tmp_path: Path) -> None:
    Flaky.seen.clear()
    with TrajectoryStore(tmp_path / "s", "a") as store:
        found = rollout(Flaky, TASKS, parrot(lambda p, s: "x"), store=store)
    assert [t.id.attempt for t in found] == [1] * 6
    assert all(t.final and t.reward == 1.0 for t in found)
    kept = list(TrajectoryStore(tmp_path / "s"))
    assert len(kept) == 12
    failed = [t for t in kept if not t.final]
    assert {t.outcome for t in failed} == {Outcome.ENV_ERROR}
    assert all(t.reward is None for t in failed)


def test_a_failure_that_comes_back_is_final_and_suspect(parrot: Any) -> None:
    Flaky.seen.clear()
    tally = Tally()
    found = rollout(Flaky, TASKS[:2], parrot(lambda p, s: "my last words"), env_config={"failures": 99}, tally=tally)
    assert [t.id.attempt for t in found] == [2, 2]
    assert all(t.outcome is Outcome.ENV_ERROR and t.final and t.reward is None for t in found)
    assert len(tally.suspects) == 2
    assert "my last words" in tally.suspects[0]


def test_a_broken_environment_stops_training_and_its_samples_are_played_again(parrot: Any, tmp_path: Path) -> None:
    """It is known to be too much before all are played."""
    Flaky.seen.clear()
    Flaky.seen.update({"t0": 99, "t1": 99})
    options: dict[str, Any] = {"phase": "train", "iteration": 7, "training": True, "env_config": {"failures": 3}}
    options["config"] = RolloutConfig(concurrency=1)
    with TrajectoryStore(tmp_path / "s", "a") as store:
        with pytest.raises(RunStoppedError) as stopped:
            rollout(Flaky, TASKS, parrot(lambda p, s: "x"), store=store, **options)
        assert str(stopped.value) == (
            "2 of the 6 episodes of train 7 failed by environment or infrastructure, after all retries, and more than "
            "25% may not; the last: env_error: RuntimeError: the database went away"
        )
        assert stopped.value.exit_code == 3
        assert [each.task_id for each in store.ids(final_only=True)] == ["t0", "t1"]
        assert len(store) == 2 + 2 * 3
        Flaky.seen.update({"t4": 99, "t5": 99})
        found = rollout(Flaky, TASKS, parrot(lambda p, s: "x"), store=store, **options)
        assert [(t.id.attempt, t.reward) for t in found] == [(n, 1.0) for n in (0, 0, 3, 3, 0, 0)]
        assert len(store.ids(final_only=True)) == 6
        assert len(store) == 2 + 2 * 4 + 2


@pytest.mark.parametrize("changes", [{"max_dropped_share": 0.7}, {"env_error": {"train": True, "reward": 0.0}}])
def test_how_much_may_be_dropped_is_the_policys(parrot: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    Flaky.seen.clear()
    Flaky.seen.update({"t0": 99, "t1": 99})
    policy = OutcomePolicy.from_config(changes)
    options: dict[str, Any] = {"env_config": {"failures": 99}, "training": True, "policy": policy}
    with TrajectoryStore(tmp_path / "s", "a") as store:
        for _ in range(2):  # the second time it is all there
            found = rollout(Flaky, TASKS, parrot(lambda p, s: "x"), store=store, **options)
            assert [t.reward for t in found] == [1.0] * 2 + [None] * 4
            assert len(store.ids(final_only=True)) == 6
        played = sum(Flaky.seen.values())
        with pytest.raises(RunStoppedError, match="2 of the 6"):
            rollout(Flaky, TASKS, parrot(lambda p, s: "x"), store=store, **{**options, "policy": OutcomePolicy()})
        assert sum(Flaky.seen.values()) == played


def test_unscorable_tasks_stop_no_training(parrot: Any) -> None:
    class Empty(Env):
        def begin(self, task: Task) -> Any:
            raise UnscorableTask("the gold answer is empty")

        def act(self, message: Any) -> Any:
            raise AssertionError

    assert len(rollout(Empty, TASKS, parrot(lambda p, s: "x"), training=True)) == 6


def test_an_unscorable_task_is_not_retried(parrot: Any) -> None:
    class Empty(Env):
        def begin(self, task: Task) -> Any:
            raise UnscorableTask("the gold answer is empty")

        def act(self, message: Any) -> Any:
            raise AssertionError

    (found,) = rollout(Empty, TASKS[:1], parrot(lambda p, s: "x"))
    assert found.final
    assert found.id.attempt == 0
    assert found.outcome_detail.startswith("unscorable task")


def test_a_run_whose_engine_is_gone_stops_and_says_why(count_env: Any, parrot: Any, tmp_path: Path) -> None:
    def dead(prompt: str, seed: int) -> str:
        raise EngineError("connection refused")

    policy = OutcomePolicy(window=20)
    with (
        TrajectoryStore(tmp_path / "s", "a") as store,
        pytest.raises(RunStoppedError, match="connection refused"),
    ):
        rollout(count_env, TASKS, parrot(dead), policy=policy, store=store, config=RolloutConfig(samples=4))
    assert len(TrajectoryStore(tmp_path / "s")) > 0


def test_a_run_goes_on_where_it_was_cut_off(count_env: Any, parrot: Any, counts: Any, tmp_path: Path) -> None:
    config = RolloutConfig(samples=2, concurrency=3)

    async def interrupted() -> int:
        store = TrajectoryStore(tmp_path / "s", "a")
        seen = 0
        stream = rollout_stream(count_env, TASKS, parrot(counts, delay=0.002), config=config, store=store)
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        store.close()
        return seen

    asyncio.run(interrupted())
    before = {str(i) for i in TrajectoryStore(tmp_path / "s").ids()}
    assert 5 <= len(before) < 12
    engine, tally = parrot(counts), Tally()
    with TrajectoryStore(tmp_path / "s", "a") as store:
        found = rollout(count_env, TASKS, engine, config=config, store=store, tally=tally)
    assert len(found) == tally.episodes == 12
    assert len(TrajectoryStore(tmp_path / "s")) == 12
    assert tally.attempts == 12 - len(before)


def test_the_expert_plays_through_the_same_recorder(count_env: Any, renderer: Any) -> None:
    found = rollout(count_env, TASKS, expert={}, renderer=renderer)
    assert all(t.success for t in found)
    step = found[0].steps[1]
    assert step.sampler == "scripted"
    assert step.logprobs is None
    assert renderer.decode(step.response_ids) == "<say>2</say>"
    assert step.rendering == "extended"
    wrong = rollout(count_env, TASKS[:1], expert={"skip": 2}, renderer=renderer, policy=no_retries())
    assert wrong[0].outcome is Outcome.ENGINE_ERROR  # the script ended before the episode did


def no_retries() -> OutcomePolicy:
    return OutcomePolicy(treatments={outcome: Treatment(train=False) for outcome in Outcome})


def test_wrapped_environments_roll_out(count_env: Any, parrot: Any, counts: Any) -> None:
    found = rollout(
        lambda: gymnasium.wrappers.TransformReward(count_env(), lambda reward: 2 * reward), TASKS, parrot(counts)
    )
    assert all(t.reward == pytest.approx(1.5) for t in found)


def test_a_hung_environment_does_not_hold_up_the_others_or_the_end(parrot: Any) -> None:
    release = threading.Event()

    class Hangs(Env):
        def act(self, message: Any) -> Any:
            if self.task.id == "t0":
                release.wait(20)
            return "", 1.0, True, False, {}

    started = time.perf_counter()
    found = rollout(Hangs, TASKS, parrot(lambda p, s: "x"), config=RolloutConfig(step_timeout=0.2), policy=no_retries())
    assert time.perf_counter() - started < 5
    assert [t.outcome for t in found] == [Outcome.ENV_TIMEOUT] + [Outcome.COMPLETED] * 5
    release.set()


def test_rollout_works_inside_a_running_loop(count_env: Any, parrot: Any, counts: Any) -> None:
    async def notebook() -> int:
        return len(rollout(count_env, TASKS, parrot(counts)))

    assert asyncio.run(notebook()) == 6


def test_bad_config_is_one_clear_line_before_anything_is_played(count_env: Any, parrot: Any, counts: Any) -> None:
    with pytest.raises(UserError, match="gaol"):
        rollout(count_env, TASKS, parrot(counts), env_config={"gaol": 1})
    with pytest.raises(UserError, match="two of the tasks have the id 't1'"):
        rollout(count_env, [*TASKS, TASKS[1]], parrot(counts))
    with pytest.raises(UserError, match="no-such-env"):
        rollout("no-such-env", TASKS, parrot(counts))


def test_turns_are_recorded_and_experts_play_in_an_open_turn(count_env: Any, tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, turns="continue", max_observation_tokens=9)
    found = rollout(count_env, TASKS[:2], renderer=renderer, expert={})
    for trajectory in found:
        assert trajectory.success
        assert trajectory.provenance["turns"] == "continue"
        assert trajectory.provenance["max_observation_tokens"] == 9
        assert [step.rendering for step in trajectory.steps] == ["first", "continued", "continued"]
    (plain,) = rollout(count_env, TASKS[:1], renderer=Renderer(tokenizer), expert={})
    assert plain.provenance["turns"] == "conversation"
    assert "max_observation_tokens" not in plain.provenance


def test_what_turns_continue_cannot_do_is_refused_before_anything_is_played(
    count_env: Any, tokenizer: Any, parrot: Any, counts: Any
) -> None:
    class Tooled(count_env):  # type: ignore[misc]
        tools = ({"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}},)

    renderer, tally = Renderer(tokenizer, turns="continue"), Tally()
    with pytest.raises(UserError, match="no place for tool calls"):
        rollout(Tooled, TASKS, parrot(counts), renderer=renderer, tally=tally)
    hosted = OpenAIChatEngine(base_url="http://127.0.0.1:1/v1", model="m")
    for made in (renderer, Renderer(tokenizer, history="append")):
        with pytest.raises(UserError, match="needs an engine that takes token ids"):
            rollout(count_env, TASKS, hosted, renderer=made, tally=tally)
    assert tally.planned == 0
