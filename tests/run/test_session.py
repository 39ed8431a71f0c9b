"""A session sends what it records, records what came back, and keeps its failures."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from stepgym.env.messages import user
from stepgym.errors import ContextOverflow, EngineError, EngineTimeout, UserError
from stepgym.model.engines.base import ChatCompletion, ChatEngine
from stepgym.model.renderer import Renderer
from stepgym.run.session import Session, SessionLimits


def converse(session: Session, turns: int, **options: Any) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        messages = [user("Count to 3.")]
        for number in range(turns):
            message = await session.chat(messages, **options)
            messages = [*messages, message, user(f"result {number}")]
        return messages

    return asyncio.run(run())


def test_steps_hold_exactly_the_ids_sent_and_returned(parrot: Any, renderer: Any) -> None:
    engine = parrot(lambda prompt, seed: "<say>1</say>")
    session = Session(engine, renderer)
    converse(session, 5, stop=("</say>",))
    assert [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in session.steps] == engine.log
    assert [s.rendering for s in session.steps] == ["first"] + ["extended"] * 4
    for before, after in zip(session.steps, session.steps[1:], strict=False):
        assert after.prompt_ids[: before.length].tolist() == before.full_ids.tolist()


def test_a_conversation_shares_its_memory(parrot: Any, renderer: Any) -> None:
    session = Session(parrot(lambda prompt, seed: "<say>1</say>"), renderer)
    converse(session, 40)
    bases = {id(s.prompt_ids.base if s.prompt_ids.base is not None else s.prompt_ids) for s in session.steps}
    assert len(bases) < 10  # one per doubling of the buffer, not one per turn


def test_seeds_differ_by_turn_and_are_the_same_again(parrot: Any, renderer: Any) -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        seen: list[int] = []
        converse(Session(parrot(lambda p, seed, seen=seen: seen.append(seed) or "x"), renderer, seed=7), 3)
        seeds.append(seen)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_a_prompt_over_the_limit_is_never_sent(parrot: Any, renderer: Any) -> None:
    engine = parrot(lambda prompt, seed: "x" * 30)
    first = len(renderer.prompt([user("Count to 3.")]).new_ids)
    session = Session(engine, renderer, limits=SessionLimits(max_prompt_tokens=first))
    with pytest.raises(ContextOverflow, match="max_prompt_tokens"):
        converse(session, 3)
    assert len(engine.log) == 1
    with pytest.raises(ContextOverflow):  # sticky
        converse(session, 1)
    assert len(engine.log) == 1


def test_a_response_that_runs_into_the_context_is_an_overflow_and_one_that_meets_its_limit_is_truncated(
    parrot: Any, renderer: Any
) -> None:
    first = len(renderer.prompt([user("Count to 3.")]).new_ids)
    engine = parrot(lambda prompt, seed: "a b c d e f g h i j")
    session = Session(engine, renderer, limits=SessionLimits(max_response_tokens=5))
    converse(session, 1)
    assert session.steps[0].status == "truncated"
    assert len(session.steps[0].response_ids) == 5
    engine.context_length = first + 4
    session = Session(engine, renderer, limits=SessionLimits(max_response_tokens=5))
    with pytest.raises(ContextOverflow, match="end of the context"):
        converse(session, 1)
    assert session.steps[0].status == "truncated"
    engine.context_length = first
    session = Session(engine, renderer)
    with pytest.raises(ContextOverflow):
        converse(session, 1)
    assert session.steps == []


def test_a_slow_engine_is_a_timeout_and_a_broken_one_an_engine_error(parrot: Any, renderer: Any) -> None:
    slow = Session(parrot(lambda p, s: "x", delay=5), renderer, limits=SessionLimits(engine_timeout=0.05))
    with pytest.raises(EngineTimeout):
        converse(slow, 1)
    broken = Session(parrot(lambda p, s: 1 / 0), renderer)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        converse(broken, 1)


def test_an_agent_that_rewrites_history_is_recorded_as_such(parrot: Any, renderer: Any) -> None:
    session = Session(parrot(lambda prompt, seed: "<say>1</say>"), renderer)

    async def run() -> None:
        start = [user("Count to 3.")]
        said = await session.chat(start)
        again = await session.chat([*start, said, user("a long result")])
        await session.chat([*start, said, user("short"), again, user("next")])

    asyncio.run(run())
    assert [s.rendering for s in session.steps] == ["first", "extended", "agent_rewrote_history"]


def test_what_others_do_to_their_messages_changes_nothing_in_the_record(parrot: Any, renderer: Any) -> None:
    """Agents cut old observations short in place, environments take what they need out of an action."""
    engine = parrot(lambda prompt, seed: "<say>1</say>")
    session = Session(engine, renderer)

    async def run() -> None:
        messages = [user("a long observation")]
        said = await session.chat(messages, stop=("</say>",))
        messages = [*messages, said, user("another")]
        messages[0]["content"] = "[cut]"
        said["content"] = "nothing"
        del said["text"]
        assert session.step_index(said) == 0
        again = await session.chat(messages, stop=("</say>",))
        again.clear()
        messages.append(user("more"))
        assert session.step_index(again) == 1

    asyncio.run(run())
    first, second = session.steps
    assert first.new_messages == (user("a long observation"),)
    assert first.message == {"role": "assistant", "content": "<say>1</say>", "text": "<say>1</say>"}
    assert first.prompt_ids.tolist() == renderer.prompt(first.new_messages).new_ids.tolist()
    assert second.rendering == "agent_rewrote_history"
    assert second.follows is None
    assert [message["content"] for message in second.new_messages] == ["[cut]", "nothing", "another"]
    assert second.prompt_ids.tolist() == renderer.prompt(second.new_messages).new_ids.tolist()
    assert second.message["text"] == "<say>1</say>"


def test_calls_that_go_on_from_an_early_turn_are_extended_and_texts_are_not_kept(parrot: Any, renderer: Any) -> None:
    engine = parrot(lambda prompt, seed: f"<say>{seed % 9}</say>")
    session = Session(engine, renderer, seed=1)

    async def run() -> None:
        messages, early = [user("Count to 3.")], []
        for number in range(6):
            said = await session.chat(messages, stop=("</say>",))
            messages = [*messages, said, user(f"result {number}")]
            early = early or messages
        for number in range(2):
            await session.chat([*early, user(f"branch {number}")], stop=("</say>",))

    asyncio.run(run())
    assert [s.rendering for s in session.steps] == ["first"] + ["extended"] * 7
    assert [s.follows for s in session.steps] == [None, 0, 1, 2, 3, 4, 0, 0]
    for step in session.steps[6:]:
        assert step.prompt_ids[: session.steps[0].length].tolist() == session.steps[0].full_ids.tolist()
        whole = [user("Count to 3."), session.steps[0].message, *step.new_messages]
        assert step.prompt_ids.tolist() == renderer.encode(renderer.template.apply(whole, to_sample=True)).tolist()
    kept = [conversation.turn.prompt_text for conversation in session._conversations]
    assert sum(map(bool, kept)) == 3  # the ends of the three branches


def test_a_response_that_the_engine_gave_up_is_its_failure_and_no_turn(
    parrot: Any, renderer: Any, monkeypatch: Any
) -> None:
    engine = parrot(lambda p, s: "<say>1")
    whole = engine.generate

    async def abort(*args: Any, **options: Any) -> Any:
        from dataclasses import replace

        return replace(await whole(*args, **options), finish_reason="abort")

    monkeypatch.setattr(engine, "generate", abort)
    session = Session(engine, renderer)
    for _ in range(2):  # sticky
        with pytest.raises(EngineError, match="gave the response up"):
            converse(session, 1)
    assert [(s.status, s.finish_reason) for s in session.steps] == [("truncated", "abort")]


def test_interleaved_conversations_and_calls_at_once_go_on_each_with_its_own(parrot: Any, renderer: Any) -> None:
    engine = parrot(lambda prompt, seed: f"<say>{seed % 7}</say>", delay=0.001)
    session = Session(engine, renderer, seed=3)

    async def run() -> None:
        a, b = [user("first task")], [user("second task")]
        for n in range(3):
            said = await session.chat(a)
            a = [*a, said, user(f"a{n}")]
            said = await session.chat(b)
            b = [*b, said, user(f"b{n}")]
        await asyncio.gather(session.chat(a), session.chat(a), session.chat(b))

    asyncio.run(run())
    assert sorted(map(str, engine.log)) == sorted(
        str((s.prompt_ids.tolist(), s.response_ids.tolist())) for s in session.steps
    )
    assert [s.rendering for s in session.steps].count("extended") == 7


def test_rewards_go_to_the_step_of_their_conversation(parrot: Any, renderer: Any) -> None:
    session = Session(parrot(lambda p, s: "<say>1</say>"), renderer)

    async def run() -> None:
        a = await session.chat([user("one")])
        await session.chat([user("two")])
        assert session.step_index(a) == 0
        assert session.step_index(dict(a)) in (0, 1)
        assert session.step_index({"role": "assistant", "content": "never said"}) is None

    asyncio.run(run())
    session.amend_step(0, reward=0.5, reward_parts={"x": 0.5}, status="no_action")
    session.amend_step(0, reward=0.25)
    assert session.steps[0].reward == 0.75
    assert session.steps[0].status == "no_action"
    assert session.steps[1].reward == 0.0


class Hosted(ChatEngine):
    """A chat endpoint in process."""

    def __init__(self, reply: dict[str, Any], finish: str = "stop") -> None:
        self.reply, self.finish = reply, finish

    async def chat(self, messages: Any, sampling: Any, **options: Any) -> ChatCompletion:
        assert not any("text" in message for message in messages)
        return ChatCompletion(dict(self.reply), self.finish, prompt_tokens=11, response_tokens=3)


def test_chat_engines_give_steps_without_ids_and_report_calls_that_do_not_parse() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "sql", "arguments": "{oops"}}
    session = Session(Hosted({"role": "assistant", "content": None, "tool_calls": [call]}), None)
    converse(session, 2)
    step = session.steps[1]
    assert step.prompt_ids is None
    assert step.response_ids is None
    assert step.status == "malformed"
    assert step.metrics["prompt_tokens"] == 11
    assert len(step.new_messages) == 1


def test_chat_engines_cannot_go_on_from_ids(tokenizer: Any) -> None:
    for options in ({"turns": "continue"}, {"history": "append"}):
        with pytest.raises(UserError, match="needs an engine that takes token ids"):
            Session(Hosted({"role": "assistant", "content": "x"}), Renderer(tokenizer, **options))
    Session(Hosted({"role": "assistant", "content": "x"}), Renderer(tokenizer))


def test_an_open_turn_shares_its_memory_and_keeps_what_its_sampler_saw(parrot: Any, tokenizer: Any) -> None:
    engine = parrot(lambda prompt, seed: "<say>1</say>")
    session = Session(engine, Renderer(tokenizer, turns="continue"))
    converse(session, 40, stop=("</say>",))
    assert [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in session.steps] == engine.log
    assert [s.rendering for s in session.steps] == ["first"] + ["continued"] * 39
    bases = {id(s.prompt_ids.base if s.prompt_ids.base is not None else s.prompt_ids) for s in session.steps}
    assert len(bases) < 10
    assert session.prompt is not None
    assert session.prompt.text == "result 38"


def test_calls_that_overlap_and_add_nothing_to_an_open_turn_have_ids_of_their_own(parrot: Any, tokenizer: Any) -> None:
    engine = parrot(lambda prompt, seed: f"<say>{seed % 1000}</say>", delay=0.01)
    session = Session(engine, Renderer(tokenizer, turns="continue"), seed=1)

    async def run() -> None:
        start = [user("Count to 3.")]
        said = await session.chat(start, stop=("</say>",))
        await asyncio.gather(*(session.chat([*start, said], stop=("</say>",)) for _ in range(3)))

    asyncio.run(run())
    assert [s.rendering for s in session.steps] == ["first"] + ["continued"] * 3
    assert [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in session.steps] == engine.log
    for step in session.steps[1:]:
        assert step.prompt_ids.tolist() == session.steps[0].full_ids.tolist()
        assert step.message["text"] == tokenizer.decode(step.response_ids)


def test_logprobs_that_do_not_match_the_tokens_are_an_engine_error(
    parrot: Any, renderer: Any, monkeypatch: Any
) -> None:
    engine = parrot(lambda p, s: "<say>1</say>")
    whole = engine.generate

    async def short(*args: Any, **options: Any) -> Any:
        from dataclasses import replace

        return replace(await whole(*args, **options), logprobs=np.zeros(1, dtype=np.float32))

    monkeypatch.setattr(engine, "generate", short)
    with pytest.raises(EngineError, match="logprobs"):
        converse(Session(engine, renderer), 1)
