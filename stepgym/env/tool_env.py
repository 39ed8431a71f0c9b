"""An environment whose actions are tool calls, and whose tools are its methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from stepgym.env.base import Env
from stepgym.env.messages import Message, call_id, tool_result
from stepgym.env.tools import Tool, tools_of
from stepgym.env.worker import call_hook
from stepgym.errors import ActionError
from stepgym.plugins import unknown
from stepgym.record.outcome import Outcome


class ToolEnv(Env):
    """An environment whose tools are those of its methods that are decorated with `@tool`.

    A subclass writes `tasks`, tools, `score`, and where it keeps state, `begin`. An episode ends on a message without
    tool calls, when a tool calls `self.finish()`, or after `max_turns`; then `score` is asked for the reward.

    Several calls in one turn run in order, and each gets its result. A call of an unknown tool, or whose arguments do
    not fit the schema, does not run: it gets an error result while the others run. A tool's `ActionError` and the
    exceptions listed in its `agent_errors` become its result; any other exception is the environment's fault.

    Attributes:
        last_message: The agent's most recent message of this episode, for `score`; None before the first.

    Example:
        >>> class Guess(ToolEnv):
        ...     '''Find a number from 1 to 100.'''
        ...     max_turns = 8
        ...     def tasks(self, split):
        ...         return [Task(id=str(n), prompt="Guess 1..100.", answer=n) for n in range(1, 101)]
        ...     def begin(self, task):
        ...         self.won = False
        ...         return super().begin(task)
        ...     @tool
        ...     def guess(self, number: int) -> str:
        ...         '''Try a number.'''
        ...         self.won = number == self.task.answer
        ...         return "right" if self.won else "low" if number < self.task.answer else "high"
        ...     def score(self) -> float:
        ...         return float(self.won)
    """

    last_message: Message | None
    _tools: ClassVar[dict[str, Tool]] = {}
    _finished: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tools = tools_of(cls)
        if "tools" not in cls.__dict__:
            cls.tools = [tool.schema for tool in cls._tools.values()]

    def __new__(cls, *args: Any, **kwargs: Any) -> ToolEnv:
        """Make the state here, so that subclasses need not call `super().__init__` to have it."""
        self = super().__new__(cls, *args, **kwargs)
        assert isinstance(self, ToolEnv)
        self._finished = False
        self.last_message = None
        return self

    def score(self) -> Any:
        """The reward of the episode that has just ended: a number, or a mapping of named parts, which are summed.

        May be a coroutine function. Called once per episode.
        """
        raise NotImplementedError(f"abstract: {type(self).__name__} does not define score()")

    def finish(self) -> None:
        """End the episode after the tool that calls this; further calls of the same turn do not run."""
        self._finished = True

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode; see `Env.areset`."""
        self._finished = False
        self.last_message = None
        return await super().areset(seed=seed, options=options)

    async def act(self, message: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Run the message's tool calls in order. Raises `ActionError` when its only call is not well-formed."""
        self.last_message = message
        calls = message.get("tool_calls") or []
        if not calls:
            return await self._scored([], {})
        checked = [self._check(call) for call in calls]
        errors = [outcome for outcome in checked if isinstance(outcome, ActionError)]
        if errors and len(calls) == 1:
            raise errors[0]
        results: list[Message] = []
        for index, (call, outcome) in enumerate(zip(calls, checked, strict=True)):
            if self._finished:
                text = "Not run: the episode has ended."
            elif isinstance(outcome, ActionError):
                text = f"Error: {outcome}"
            else:
                text, error = await self._run(*outcome)
                if error is not None:
                    errors.append(error)
            results.append(tool_result(text, call_id(call, index)))
        info: dict[str, Any] = {}
        if errors:
            info["action_error"] = "; ".join(str(error) for error in errors)
            statuses = [error.status for error in errors]
            info["action_status"] = "malformed" if "malformed" in statuses else statuses[0]
        if self._finished:
            return await self._scored(results, info)
        return results, 0.0, False, False, info

    async def conclude(self, outcome: Outcome) -> Any:
        """Score an episode that had to end early like any other."""
        return await call_hook(self.score)

    async def _scored(
        self, observation: list[Message], info: dict[str, Any]
    ) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        value = await call_hook(self.score)
        if isinstance(value, Mapping):
            info["reward_parts"] = dict(value)
            value = sum(value.values())
        return observation, value, True, False, info

    def _check(self, call: object) -> tuple[Tool, dict[str, Any]] | ActionError:
        """The tool that a call names and the arguments to run it with, or what is wrong with the call."""
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            return ActionError('a tool call is {"function": {"name": ..., "arguments": ...}}', status="malformed")
        offered = [schema["function"]["name"] for schema in self.tools]
        if name not in offered or name not in self._tools:
            return ActionError(unknown("tool", name[:80], offered), status="malformed")
        tool = self._tools[name]
        try:
            return tool, tool.parse(function.get("arguments"))
        except ActionError as error:
            return error

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, ActionError | None]:
        """The text of a tool's result, and the agent's error if it made one."""
        method = getattr(self, tool.attribute)
        try:
            result = await call_hook(partial(method, **arguments))
        except ActionError as error:
            return f"Error: {error}", error
        except tool.agent_errors as error:
            text = f"{type(error).__name__}: {error}"
            return f"Error: {text}", ActionError(text)
        return result_text(result), None


def result_text(result: object) -> str:
    """What a tool returned as the text that the agent reads: text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    from pydantic_core import to_jsonable_python

    return json.dumps(to_jsonable_python(result), ensure_ascii=False)
