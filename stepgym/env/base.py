"""The class that people subclass to write an environment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, final

import gymnasium
from gymnasium.error import ResetNeeded

from stepgym.config import keyword_parameters
from stepgym.env.messages import Message, as_assistant, as_observation, call_id, tool_result, user
from stepgym.env.shared import get_shared
from stepgym.env.spaces import ConversationSpace, MessageSpace
from stepgym.env.task import Task
from stepgym.env.worker import call_hook, run_blocking
from stepgym.errors import ActionError, EnvError, UserError
from stepgym.record.outcome import Outcome

ActResult = tuple[Any, float, bool, bool, dict[str, Any]]


class Env(gymnasium.Env[list[Message], "Message | str"]):
    """A `gymnasium.Env` whose observation is the list of new messages and whose action is one assistant message.

    A subclass writes `tasks`, `begin` and `act`; each of `begin`, `act` and `conclude` may be a coroutine function.
    `reset` and `step` are synchronous and final, `areset` and `astep` are what rollouts await. The keyword-only
    parameters of the constructor are the environment's config. An environment is made fresh for every episode and
    must cost under 1 ms to make: heavy things come from `open_shared`.

    In `act`, raise `ActionError` for what the agent did wrong: it becomes an observation and costs a turn. Any other
    exception is the environment's fault and never becomes reward.

    Attributes:
        max_turns: Actions per episode. After the last one the episode is truncated and `conclude` scores it.
        reward_range: (low, high) of an episode's total reward.
        success_threshold: An episode's total reward from which on it counts as a success, unless `act` says so itself
            in `info["success"]`.
        on_malformed: Whether a tool call that does not parse costs a turn (`observe`) or ends the episode with the
            lowest reward (`end`).
        stop: Strings that end a turn; they are kept in the text.
        tools: JSON schemas of the tools on offer, in the OpenAI format.
        splits: Names that `tasks` knows.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    max_turns: int = 10
    reward_range: tuple[float, float] = (0.0, 1.0)
    success_threshold: float = 1.0
    on_malformed: Literal["observe", "end"] = "observe"
    stop: tuple[str, ...] = ()
    tools: Sequence[dict[str, Any]] = ()
    splits: tuple[str, ...] = ("train", "validation", "test")

    action_space = MessageSpace()
    observation_space = ConversationSpace()

    _given: dict[str, Any]
    _task: Task | None
    _turn: int
    _total: float
    _over: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Env:
        """Keep the config here, so that subclasses need not call `super().__init__` to have it."""
        self = super().__new__(cls)
        self._given = dict(kwargs)
        self._task = None
        self._turn = 0
        self._total = 0.0
        self._over = True
        self.action_space = MessageSpace()
        self.observation_space = ConversationSpace()
        return self

    # ---- what a subclass writes -------------------------------------------------------------------------------

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split: a sequence (which may make its items on demand) or a `datasets.Dataset` of rows.

        Raises `UserError` for a split that does not exist.
        """
        raise NotImplementedError(f"abstract: {type(self).__name__} does not define tasks(split)")

    def begin(self, task: Task) -> Any:
        """Start an episode. Returns the first messages (a string is one user message). May be a coroutine function."""
        return [user(task.prompt)]

    def act(self, message: Message) -> Any:
        """Answer one assistant message with `(observation, reward, terminated, truncated, info)`.

        The observation is a list of messages or a string. `info` may hold `success` (bool), `reward_parts` (named
        numbers), `metrics` (named numbers), `action_status` (`ok`, `no_action`, `malformed`), `outcome`. May be a
        coroutine function.
        """
        raise NotImplementedError(f"abstract: {type(self).__name__} does not define act(message)")

    def conclude(self, outcome: Outcome) -> Any:
        """Reward for an episode that had to end before it was over (turn limit, length, time). Called once.

        May be a coroutine function. Returns a float, or a mapping of named parts, which are summed.
        """
        return 0.0

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        """Scripted assistant messages that solve the task; advanced by one per step, so it may look at `self`."""
        raise UserError(f"{type(self).__name__} has no expert")

    @classmethod
    def open_shared(cls, **config: Any) -> Any:
        """Open what is too heavy for one episode (an index, a pool of workers). Once per process and config.

        What it returns is `self.shared` in every environment; its `close()`, if any, is called when the run ends.
        May be a coroutine function.
        """
        return None

    # ---- what a subclass may use ------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The current task. Raises `ResetNeeded` before the first reset."""
        if self._task is None:
            raise ResetNeeded("call reset() before using the environment")
        return self._task

    @property
    def turns_left(self) -> int:
        """Actions that the agent may still take in this episode."""
        return max(0, self.max_turns - self._turn)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's keyword-only parameters as they are in force, defaults included."""
        cls: Any = type(self)
        return {**_defaults(cls), **self._given}

    @property
    def shared(self) -> Any:
        """What `open_shared` returned for this class and config."""
        return get_shared(type(self), self.config)

    def error_observation(self, message: Message, error: ActionError) -> Any:
        """What the agent is told after an `ActionError`: one result per tool call, or one user message."""
        calls = message.get("tool_calls") or ()
        if calls:
            return [tool_result(f"Error: {error}", call_id(call, index)) for index, call in enumerate(calls)]
        return [user(f"Error: {error}")]

    # ---- what gymnasium and rollouts call ---------------------------------------------------------------------

    @final
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode, synchronously. See `areset`."""
        return run_blocking(self.areset(seed=seed, options=options))

    @final
    def step(self, action: Message | str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Play one action, synchronously. See `astep`."""
        return run_blocking(self.astep(action))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Seeds `self.np_random`, which also draws the task where none is given.
            options: `task` (a `Task`) plays that one; `split` (default: the first of `splits`) draws one from it.

        Returns:
            The first messages, and `{"task_id": ...}`.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        task = options.pop("task", None)
        split = options.pop("split", self.splits[0])
        if options:
            raise UserError(f"reset: unknown option {sorted(options)[0]!r}; known: split, task")
        if task is None:
            table = await call_hook(self.tasks, split)
            if len(table) == 0:
                raise UserError(f"{type(self).__name__}: the split {split!r} has no tasks")
            task = table[int(self.np_random.integers(len(table)))]
        self._task = task if isinstance(task, Task) else Task.from_dict(task)
        self._turn, self._total, self._over = 0, 0.0, False
        messages = as_observation(await call_hook(self.begin, self._task))
        return messages, {"task_id": self._task.id}

    async def astep(self, action: object) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Play one assistant message (or a string that stands for one).

        Returns:
            `(observation, reward, terminated, truncated, info)`. At the end of an episode `info` has `success`; when
            it ended at `max_turns`, also `turn_limit`. After an `ActionError`, `info["action_error"]` is its text and
            `info["action_status"]` its status.
        """
        if self._over:
            raise ResetNeeded("the episode is over: call reset()")
        self._turn += 1
        message: Message = {"role": "assistant", "content": "", "text": ""}
        try:
            message = as_assistant(action)
            result = await self._play(message)
        except ActionError as error:
            info: dict[str, Any] = {"action_error": str(error), "action_status": error.status}
            result = (self.error_observation(message, error), 0.0, False, False, info)
        observation, reward, terminated, truncated, info = self._checked(result)
        if self._turn >= self.max_turns and not (terminated or truncated):
            truncated = True
            info["turn_limit"] = True
            reward += await self.aconclude(Outcome.TURN_LIMIT, info)
        self._total += reward
        self._over = terminated or truncated
        if self._over:
            info.setdefault("success", self._total >= self.success_threshold)
        return observation, reward, terminated, truncated, info

    async def aconclude(self, outcome: Outcome, info: dict[str, Any] | None = None) -> float:
        """Call `conclude` and return its reward; named parts are added to `info["reward_parts"]`."""
        value = await call_hook(self.conclude, outcome)
        if isinstance(value, Mapping):
            if info is not None:
                info["reward_parts"] = {**info.get("reward_parts", {}), **value}
            value = sum(value.values())
        self._over = True
        return self._number(value, "conclude")

    async def _play(self, message: Message) -> Any:
        invalid = message.get("invalid_tool_calls")
        if not invalid:
            return await call_hook(self.act, message)
        text = "; ".join(str(call.get("error", call) if isinstance(call, Mapping) else call) for call in invalid)
        if self.on_malformed == "end":
            info = {"action_error": text, "action_status": "malformed", "outcome": str(Outcome.MALFORMED_ACTION)}
            return [], self.reward_range[0] - self._total, True, False, {**info, "success": False}
        raise ActionError(f"the tool call does not parse: {text}", status="malformed")

    def _checked(self, result: Any) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """The result of `act`, with its types made plain. Raises `EnvError` for what is not one."""
        where = f"{type(self).__name__}.act"
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{where} must return (observation, reward, terminated, truncated, info), got {result!r:.200}"
            )
        observation, reward, terminated, truncated, info = result
        if not isinstance(info, Mapping | None):
            raise EnvError(f"{where}: info must be a mapping, got {info!r:.200}")
        messages = as_observation(observation)
        return messages, self._number(reward, "act"), bool(terminated), bool(truncated), dict(info or {})

    def _number(self, reward: Any, hook: str) -> float:
        where = f"{type(self).__name__}.{hook}"
        try:
            number = float(reward)
        except (TypeError, ValueError):
            raise EnvError(f"{where}: the reward must be a number, got {reward!r:.200}") from None
        if not math.isfinite(number):
            raise EnvError(f"{where}: the reward must be finite, got {number}")
        return number


@cache
def _defaults(cls: Any) -> dict[str, Any]:
    """The default values of the config of an environment's class."""
    parameters = keyword_parameters(cls).values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
