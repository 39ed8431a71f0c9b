from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from hypothesis import given
from hypothesis import strategies as st

from stepgym import ActionError, Task, ToolEnv, tool
from stepgym.env.messages import Message, tool_call
from stepgym.errors import EnvError
from stepgym.record.outcome import Outcome


# fmt: off
class Guess(ToolEnv):
    """Find a number from 1 to 100."""
    max_turns = 8
    def tasks(self, split): return [Task(id=str(n), prompt="Guess 1..100.", answer=n) for n in range(1, 101)]  # type: ignore
    def begin(self, task): self.won = False; return super().begin(task)  # type: ignore  # noqa
    @tool
    def guess(self, number: int) -> str:
        """Try a number."""
        self.won = number == self.task.answer
        return "right" if self.won else "low" if number < self.task.answer else "high"
    def score(self) -> float: return float(self.won)          # or a dict of parts, which are summed
# fmt: on


class Shelf(ToolEnv):
    """Tools of every kind, and a log of what ran."""

    max_turns = 4

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="only", prompt="Do something.")]

    def begin(self, task: Task) -> str:
        self.log: list[Any] = []
        return "Do something."

    @tool
    def note(self, text: str) -> None:
        """Write down."""
        self.log.append(text)

    @tool
    async def wait(self, seconds: float) -> dict[str, float]:
        """Wait."""
        await asyncio.sleep(seconds)
        return {"waited": seconds}

    @tool(agent_errors=(KeyError, ZeroDivisionError))
    def fail(self, how: str) -> str:
        """Fail."""
        if how == "key":
            raise KeyError("missing")
        if how == "action":
            raise ActionError("not allowed", status="no_action")
        raise OSError("disk full")

    @tool
    def stop(self) -> str:
        """Finish."""
        self.finish()
        return "bye"

    def score(self) -> dict[str, float]:
        return {"notes": 0.1 * len(self.log), "base": 0.5}


def begun(cls: type[ToolEnv] = Shelf, **options: Any) -> ToolEnv:
    env = cls()
    env.reset(seed=0, options=options)
    return env


def calls(*parts: Message) -> Message:
    entries = [dict(part["tool_calls"][0], id=f"id{index}") for index, part in enumerate(parts)]
    return {"role": "assistant", "content": "", "tool_calls": entries}


def test_the_example_of_the_design_runs() -> None:
    env = Guess()
    observation, _ = env.reset(seed=3, options={"task": Task(id="40", prompt="Guess 1..100.", answer=40)})
    assert observation == [{"role": "user", "content": "Guess 1..100."}]
    observation, reward, terminated, truncated, _ = env.step(tool_call("guess", number=50))
    assert (observation[0]["content"], reward, terminated, truncated) == ("high", 0.0, False, False)
    observation, *_ = env.step(tool_call("guess", number=40))
    assert observation == [{"role": "tool", "content": "right", "tool_call_id": "call_0"}]
    observation, reward, terminated, truncated, info = env.step("It is 40.")
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert info["success"] is True


def test_the_example_passes_gymnasiums_checker() -> None:
    gymnasium_check(Guess(), skip_render_check=True)


def test_the_last_turn_scores_through_conclude() -> None:
    env = begun(Guess, task=Task(id="1", answer=1))
    for _ in range(7):
        assert env.step(tool_call("guess", number=2))[3] is False
    _, reward, terminated, truncated, info = env.step(tool_call("guess", number=1))
    assert (reward, terminated, truncated) == (1.0, False, True)
    assert info["turn_limit"]
    assert info["success"]


def test_a_loop_that_ends_an_episode_gets_the_score() -> None:
    env = begun()
    env.step(tool_call("note", text="a"))
    info: dict[str, Any] = {}
    assert asyncio.run(env.aconclude(Outcome.CONTEXT_OVERFLOW, info)) == pytest.approx(0.6)
    assert info["reward_parts"] == {"notes": 0.1, "base": 0.5}


def test_parallel_calls_run_in_order_and_each_gets_its_result() -> None:
    env = begun()
    observation, *_ = env.step(calls(*(tool_call("note", text=str(n)) for n in range(5)), tool_call("wait", seconds=0)))
    assert env.log == ["0", "1", "2", "3", "4"]  # type: ignore[attr-defined]
    assert [message["tool_call_id"] for message in observation] == [f"id{n}" for n in range(6)]
    assert observation[-1]["content"] == '{"waited": 0.0}'
    assert observation[0]["content"] == "null"


def test_one_bad_call_among_several_does_not_stop_the_others() -> None:
    env = begun()
    observation, _, terminated, _, info = env.step(
        calls(tool_call("note", text="a"), tool_call("note", text=5), tool_call("nota"), tool_call("note", text="b"))
    )
    assert env.log == ["a", "b"]  # type: ignore[attr-defined]
    assert not terminated
    texts = [message["content"] for message in observation]
    assert texts[0] == texts[3] == "null"
    assert texts[1] == "Error: note.text: expected a string, got 5"
    assert texts[2].startswith("Error: unknown tool 'nota'; did you mean 'note'?")
    assert info["action_status"] == "malformed"


def test_a_single_bad_call_is_an_action_error() -> None:
    env = begun()
    observation, reward, terminated, _, info = env.step(tool_call("note", text=5))
    assert (reward, terminated) == (0.0, False)
    assert info["action_error"] == "note.text: expected a string, got 5"
    assert info["action_status"] == "malformed"
    assert observation[0]["role"] == "tool"


def test_listed_exceptions_and_action_errors_become_results() -> None:
    env = begun()
    observation, _, terminated, _, info = env.step(tool_call("fail", how="key"))
    assert observation[0]["content"] == "Error: KeyError: 'missing'"
    assert (terminated, info["action_status"]) == (False, "ok")
    observation, _, _, _, info = env.step(tool_call("fail", how="action"))
    assert observation[0]["content"] == "Error: not allowed"
    assert info["action_status"] == "no_action"


def test_other_exceptions_are_the_environments_fault() -> None:
    env = begun()
    with pytest.raises(OSError, match="disk full"):
        env.step(tool_call("fail", how="disk"))


def test_finish_ends_the_episode_and_later_calls_do_not_run() -> None:
    env = begun()
    observation, reward, terminated, _, info = env.step(
        calls(tool_call("note", text="a"), tool_call("stop"), tool_call("note", text="b"))
    )
    assert [message["content"] for message in observation] == ["null", "bye", "Not run: the episode has ended."]
    assert terminated
    assert reward == pytest.approx(0.6)
    assert info["reward_parts"] == {"notes": 0.1, "base": 0.5}
    env.reset(seed=0)
    assert env.step(tool_call("note", text="again"))[2] is False


def test_a_call_that_does_not_parse_is_no_final_answer() -> None:
    broken = {"role": "assistant", "content": "", "invalid_tool_calls": [{"text": "<tool_call>{", "error": "not JSON"}]}
    env = begun()
    observation, _, terminated, _, info = env.step(broken)
    assert not terminated
    assert info["action_status"] == "malformed"
    assert observation == [{"role": "user", "content": "Error: the tool call does not parse: not JSON"}]
    env = begun()
    env.on_malformed = "end"
    _, reward, terminated, _, info = env.step(broken)
    assert (reward, terminated, info["outcome"], info["success"]) == (0.0, True, "malformed_action", False)


def test_only_tools_on_offer_can_be_called() -> None:
    env = begun()
    env.tools = [entry for entry in env.tools if entry["function"]["name"] == "stop"]
    observation, *_ = env.step(tool_call("note", text="a"))
    assert observation[0]["content"] == "Error: unknown tool 'note'; known: stop"


def test_results_that_are_not_text_are_json() -> None:
    @dataclasses.dataclass
    class Row:
        name: str
        size: int

    class Table(Shelf):
        @tool
        def rows(self) -> list[Row]:
            """List rows."""
            return [Row("naïve", 1)]

    assert begun(Table).step(tool_call("rows"))[0][0]["content"] == '[{"name": "naïve", "size": 1}]'


def test_the_last_message_is_there_for_the_score() -> None:
    class Echo(Shelf):
        def score(self) -> float:  # type: ignore[override]
            assert self.last_message is not None
            return float(self.last_message["content"] == "42")

    assert begun(Echo).step("42")[1] == 1.0
    assert begun(Echo).step("41")[1] == 0.0


def test_a_score_that_is_no_number_is_the_environments_fault() -> None:
    class Wrong(Shelf):
        def score(self) -> str:  # type: ignore[override]
            return "much"

    with pytest.raises(EnvError, match="the reward must be a number, got 'much'"):
        begun(Wrong).step("done")


def test_an_async_score_is_awaited() -> None:
    class Slow(Shelf):
        async def score(self) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            return 0.75

    assert begun(Slow).step("done")[1] == 0.75


def any_call() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats()
    junk = st.recursive(
        leaves, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(), x, max_size=2), max_leaves=4
    )
    names = st.sampled_from(["note", "wait", "stop", "fail", ""]) | st.text()
    arguments = junk | st.text() | st.just('{"text": "x"}') | st.just('{"how": "key"}')
    call = st.fixed_dictionaries(
        {"id": junk, "function": st.fixed_dictionaries({"name": names, "arguments": arguments})}
    )
    return call | junk


@given(
    st.lists(
        st.fixed_dictionaries({"content": st.text() | st.none(), "tool_calls": st.lists(any_call(), max_size=3)}),
        max_size=5,
    )
)
def test_whatever_is_called_is_answered(messages: list[Message]) -> None:
    class Calm(Shelf):
        fail = None  # type: ignore[assignment]

        @tool
        async def wait(self, seconds: float) -> str:  # type: ignore[override]
            """Do not wait."""
            return "x"

    env = Calm()
    env.reset(seed=0)
    for message in messages:
        observation, _, terminated, truncated, _ = env.step(message)
        assert env.observation_space.contains(observation)
        if not terminated and not truncated:
            assert len(observation) == len(message["tool_calls"])
        if terminated or truncated:
            return


def test_an_expert_may_look_at_the_environment() -> None:
    class Bisect(Guess):
        def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
            while not self.won:
                yield tool_call("guess", number=task.answer)
            yield "done"

    env = begun(Bisect, task=Task(id="9", answer=9))
    ends = [env.step(message)[2] for message in env.expert(env.task)]
    assert ends == [False, True]
