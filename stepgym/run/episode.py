"""One agent in one environment for one task, from reset to outcome."""

from __future__ import annotations

import asyncio
import math
import operator
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium

from stepgym.env.base import Env
from stepgym.env.messages import Message
from stepgym.env.task import Task
from stepgym.env.worker import threads
from stepgym.errors import (
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EnvError,
    EnvTimeout,
    EpisodeTimeout,
    StepgymError,
    UnscorableTask,
)
from stepgym.record.outcome import Outcome
from stepgym.record.step import StepStatus
from stepgym.run.session import Session

ENV_TURN = "env_turn"
"""In a step's metrics: its message was the environment's action number so many, counted from 1. Absent from turns that
the environment was never given (side conversations, a turn that was cut off by the context's end)."""


class RunsEpisodes(Protocol):
    """What an episode needs of an agent; see `stepgym.run.agent.Agent`."""

    async def run(self, episode: Episode) -> None:
        """Play the episode to its end."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Time limits, in seconds; None waits for ever.

    Attributes:
        step_timeout: The watchdog for one call of the environment (reset, step, conclude, close).
        episode_timeout: For the whole episode; a budget, not a fault.
    """

    step_timeout: float | None = 120.0
    episode_timeout: float | None = 1800.0


@dataclass(slots=True)
class EpisodeResult:
    """How an episode ended. `reward` and `success` are None where it could not be scored."""

    outcome: Outcome
    detail: str = ""
    error: str = ""
    reward: float | None = None
    success: bool | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Episode:
    """What an agent is given: the task, the environment, the session, and the conversation so far.

    Attributes:
        task: The task.
        env: The environment, possibly wrapped.
        session: The line to the model.
        messages: The conversation so far; `step` adds to it.
        done: Whether the environment has ended the episode.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], task: Task, session: Session, *, limits: EpisodeLimits | None = None
    ) -> None:
        self.env = env
        self.task = task
        self.session = session
        self.messages: list[Message] = []
        self.done = False
        self._limits = limits or EpisodeLimits()
        self._failure: EnvError | None = None
        self._end = EpisodeResult(Outcome.COMPLETED)
        self._reward = 0.0
        self._turns = 0
        # A wrapper may change what reset and step do, so only a bare environment is awaited directly.
        self._bare: Env | None = env if isinstance(env, Env) else None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools on offer."""
        return tuple(self.env.get_wrapper_attr("tools"))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn."""
        return tuple(self.env.get_wrapper_attr("stop"))

    async def step(self, message: Message) -> list[Message]:
        """Play one assistant message in the environment and return what it answers.

        The message and the answer are added to `messages`; the reward goes to the last recorded step of the
        conversation that holds the message. Raises `EnvError` or `EnvTimeout` when the environment fails, now and at
        every later call.
        """
        if self._failure is not None:
            raise self._failure
        if self.done:
            raise RuntimeError("the episode is over; check `episode.done`")
        index = self.session.step_index(message)
        try:
            observation, reward, terminated, truncated, info = await self._call(
                self._bare.astep(message) if self._bare is not None else threads.run(self.env.step, message)
            )
            reward = float(reward)
            if not math.isfinite(reward):  # a bare environment has been checked already, a wrapper has not
                self._failure = EnvError(f"the environment's reward is {reward}")
                raise self._failure
        except BaseException:  # the environment was given the action, though it never answered
            self._mark(index, message)
            raise
        self._turns += 1
        self._reward += reward
        parts = {str(name): float(value) for name, value in (info.get("reward_parts") or {}).items()}
        for name, value in parts.items():
            self._end.reward_parts[name] = self._end.reward_parts.get(name, 0.0) + value
        numbers = {str(name): float(value) for name, value in (info.get("metrics") or {}).items()}
        if info.get("action_error"):
            numbers["action_error"] = 1.0
        if index is not None:
            status: StepStatus | None = info.get("action_status")
            if self.session.steps[index].message is self.session.recorded(message):
                numbers[ENV_TURN] = float(self._turns)
            else:
                self._mark(index, message, turn=self._turns)
            self.session.amend_step(index, reward=reward, reward_parts=parts, metrics=numbers, status=status)
        self.messages.append(message)
        self.messages.extend(observation)
        if terminated or truncated:
            self.done = True
            self._settle(index, info)
        return list(observation)

    async def play(self, agent: RunsEpisodes, *, seed: int) -> EpisodeResult:
        """Run the whole episode: reset, agent, outcome, and the environment closed whatever happens.

        Never raises for what goes wrong inside: failures are the result's `outcome`. Only cancellation passes through.
        """
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._limits.episode_timeout):
                await self._reset(seed)
                await agent.run(self)
            if self._failed() is None and not self.done:
                raise RuntimeError("the agent returned before the episode was over")
            result = await self._result(self._failed())
        except TimeoutError as error:
            # `asyncio.timeout` raises it from outside; one that the agent raised itself is the agent's.
            over = time.perf_counter() - started >= (self._limits.episode_timeout or float("inf"))
            result = await self._result(self._failed() or error, out_of_time=over)
        except (Exception, SystemExit) as error:  # an agent that calls sys.exit() ends its own episode only
            result = await self._result(self._failed() or error)
        finally:
            await self._close()
        result.metrics["turns"] = float(self._turns)
        result.metrics["wall_s"] = time.perf_counter() - started
        return result

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _mark(self, index: int | None, message: Message, *, turn: int | None = None) -> None:
        """Note in the record which step said the action that the environment was given; none may have said it."""
        if index is None:
            return
        # The conversation may have gone on since the model said this (an agent that thinks again before it acts).
        steps = self.session.steps
        recorded = self.session.recorded(message)
        for same in (operator.is_, operator.eq):
            for said in range(index, -1, -1):
                if same(steps[said].message, recorded):
                    self.session.amend_step(said, metrics={ENV_TURN: float(turn or self._turns + 1)})
                    return

    async def _reset(self, seed: int) -> None:
        options = {"task": self.task}
        if self._bare is not None:
            call = self._bare.areset(seed=seed, options=options)
        else:
            call = threads.run(lambda: self.env.reset(seed=seed, options=options))
        observation, _ = await self._call(call)
        self.messages = list(observation)

    async def _call(self, call: Any) -> Any:
        """Await a call of the environment under the watchdog; whatever it raises is the environment's fault."""
        try:
            async with asyncio.timeout(self._limits.step_timeout):
                return await call
        except TimeoutError:
            limit = self._limits.step_timeout
            self._failure = EnvTimeout(f"the environment did not answer within {limit} s (step_timeout)")
        except EnvError as error:
            self._failure = error
        except Exception as error:
            self._failure = EnvError(f"{type(error).__name__}: {error}")
            self._failure.__cause__ = error
        raise self._failure

    def _failed(self) -> StepgymError | None:
        """The first failure of environment or model: sticky, whatever the agent made of it."""
        return self._failure or (self.session.failure if not self.done else None)

    def _settle(self, index: int | None, info: Mapping[str, Any]) -> None:
        """The environment has ended the episode: say why."""
        end = self._end
        last = self.session.steps[index] if index is not None else None
        if info.get("outcome"):
            end.outcome = Outcome(info["outcome"])
        elif info.get("turn_limit"):
            end.outcome = Outcome.TURN_LIMIT
        elif last is not None and last.status == "truncated":
            end.outcome = Outcome.RESPONSE_TRUNCATED
        end.detail = str(info.get("action_error", "")) if end.outcome is not Outcome.COMPLETED else ""
        end.reward = self._reward
        end.success = bool(info.get("success", self._reward >= self.env.get_wrapper_attr("success_threshold")))

    async def _result(self, error: BaseException | None, *, out_of_time: bool = False) -> EpisodeResult:
        end = self._end
        if error is None or (self.done and self._failure is None):
            return end
        end.outcome = Outcome.EPISODE_TIMEOUT if out_of_time else outcome_of(error)
        end.detail = _one_line(error)
        if out_of_time:
            end.detail = f"over {self._limits.episode_timeout} s (episode_timeout)"
        if not end.outcome.scored:
            end.error = "".join(traceback.format_exception(error))
            end.reward, end.success, end.reward_parts = None, None, {}
            return end
        try:
            await self._conclude(end)
        except EnvError as failure:
            end.outcome, end.detail = outcome_of(failure), _one_line(failure)
            end.error = "".join(traceback.format_exception(failure))
            end.reward, end.success, end.reward_parts = None, None, {}
        return end

    async def _conclude(self, end: EpisodeResult) -> None:
        """Ask the environment, once, for the reward of an episode that had to end early."""
        if not self.messages:
            return  # it never began
        env: Env = self.env.unwrapped  # type: ignore[assignment]
        info: dict[str, Any] = {}
        reward = await self._call(env.aconclude(end.outcome, info))
        for name, value in info.get("reward_parts", {}).items():
            end.reward_parts[name] = end.reward_parts.get(name, 0.0) + float(value)
        self._reward += reward
        if self.session.steps:
            self.session.amend_step(len(self.session.steps) - 1, reward=reward, reward_parts=info.get("reward_parts"))
        end.reward = self._reward
        end.success = self._reward >= self.env.get_wrapper_attr("success_threshold")

    async def _close(self) -> None:
        """Close the environment; one that hangs is left behind on its thread."""
        if getattr(self.env.close, "__func__", None) is gymnasium.Env.close:
            return  # nothing to close, and a thread costs more than all else here
        try:
            async with asyncio.timeout(self._limits.step_timeout):
                await threads.run(self.env.close)
        except Exception as error:
            self._end.metrics["close_failed"] = 1.0
            self._end.error += f"closing the environment failed: {_one_line(error)}\n"


def outcome_of(error: BaseException) -> Outcome:
    """The outcome that an exception stands for; what nobody classified is the agent code's."""
    kinds: tuple[tuple[type[BaseException], Outcome], ...] = (
        (ContextOverflow, Outcome.CONTEXT_OVERFLOW),
        (EpisodeTimeout, Outcome.EPISODE_TIMEOUT),
        (EngineTimeout, Outcome.ENGINE_TIMEOUT),
        (EngineError, Outcome.ENGINE_ERROR),
        (EnvTimeout, Outcome.ENV_TIMEOUT),
        (EnvError, Outcome.ENV_ERROR),
    )
    return next((outcome for kind, outcome in kinds if isinstance(error, kind)), Outcome.AGENT_ERROR)


def _one_line(error: BaseException) -> str:
    prefix = "unscorable task: " if isinstance(error, UnscorableTask) else ""
    known = isinstance(error, StepgymError)
    text = str(error) if known and str(error) else f"{type(error).__name__}: {error}"
    return prefix + " ".join(text.split())[:1000]
