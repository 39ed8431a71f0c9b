"""One recorded episode played again in a fresh environment, and compared turn by turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgym.env.messages import Message
from stepgym.env.task import Task
from stepgym.errors import ContextOverflow, EpisodeTimeout, StepgymError
from stepgym.inspect.difference import (
    Difference,
    What,
    as_recorded,
    holds,
    messages_diff,
    same,
    value_diff,
)
from stepgym.inspect.main_line import MainLine, NotReplayableError, main_line, recorded_observation
from stepgym.record.outcome import Fault, Outcome
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory
from stepgym.run.env_source import EnvSource
from stepgym.run.episode import Episode, EpisodeLimits, EpisodeResult
from stepgym.run.session import Session

_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class ReplayedEpisode:
    """What playing one trajectory again came to.

    Attributes:
        trajectory: Its id, as text.
        turns: Actions that were played.
        observations: Answers of the environment that the record shows and that were compared.
        differences: Where the replay differs, in the order of the turns.
        problem: Why it could not be played to its end, in one line; empty where it was.
        kind: What the problem is: `not_replayable` (the record does not tell), `no_environment` (it cannot be made),
            `failed` (it raised or hung, where it had not in the record). Empty without a problem.
    """

    trajectory: str
    turns: int = 0
    observations: int = 0
    differences: tuple[Difference, ...] = ()
    problem: str = ""
    kind: str = ""


async def replay_episode(trajectory: Trajectory, source: EnvSource, limits: EpisodeLimits) -> ReplayedEpisode:
    """Play a trajectory's actions in a fresh environment of `source` and compare. Raises nothing but cancellation.

    The environment is made, reset, stepped, concluded and closed by the same `Episode` that a rollout uses, under the
    same watchdog. A trajectory that ended in a failure is played up to it; where the environment failed, it is given
    that last action too.
    """
    name = str(trajectory.id)
    try:
        line = main_line(trajectory)
        if "env" not in trajectory.seeds or not trajectory.task.get("id"):
            raise NotReplayableError("the record has no environment seed or no task")
        if trajectory.outcome is Outcome.EPISODE_TIMEOUT and line.unanswered is not None:
            raise NotReplayableError("the episode's time ran out while the environment was answering")
        task = Task.from_dict(trajectory.task)
    except StepgymError as error:
        return ReplayedEpisode(name, problem=_line(error), kind="not_replayable")
    failed_before = trajectory.outcome.fault is Fault.ENVIRONMENT
    try:
        env = source.make()
    except (Exception, SystemExit) as error:
        if failed_before and not trajectory.steps:
            return ReplayedEpisode(name)  # as it failed in the record
        return ReplayedEpisode(name, problem=f"{type(error).__name__}: {_line(error)}", kind="no_environment")
    player = _Player(trajectory, line)
    episode = Episode(env, task, player.session, limits=limits)
    result = await episode.play(player, seed=int(trajectory.seeds["env"]))
    ended = player.over and episode.done
    failed = result.outcome.fault is Fault.ENVIRONMENT and not ended
    if failed and failed_before and player.reached_failure:
        player.compare("outcome", None, str(trajectory.outcome), str(result.outcome))
    elif failed or not player.over:
        problem = f"{result.outcome} after {player.turns} turns: {result.detail}"
        return ReplayedEpisode(
            name, player.turns, player.observations, tuple(player.differences), problem=_line(problem), kind="failed"
        )
    else:
        player.compare_rewards(result)
        tools = list(env.get_wrapper_attr("tools"))
        player.compare("tools", None, list(trajectory.tools), tools)
    return ReplayedEpisode(name, player.turns, player.observations, tuple(player.differences))


class _RecordedSession(Session):
    """A session that samples nothing: its steps are those of the record, with what the environment added taken off."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = [
            Step(
                prompt_ids=None,
                response_ids=None,
                message=step.message,
                status="truncated" if step.status == "truncated" else "ok",
            )
            for step in steps
        ]
        self.failure = None
        self.playing: int | None = None

    def recorded(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message: a replay records nothing."""
        return message

    def step_index(self, message: Mapping[str, Any]) -> int | None:
        """The step that is being played."""
        return self.playing


class _EndOfRecord(Exception):
    """The record goes no further: what would end the episode is not for the environment to score."""


@dataclass(eq=False)
class _Player:
    """The agent of a replay: gives the environment the recorded actions and compares what it answers.

    Attributes:
        over: The replay came as far as the record does.
        reached_failure: The environment is at the point where it failed in the record.
        whole: The episode ended where the recorded one did, so that its totals can be compared.
    """

    trajectory: Trajectory
    line: MainLine
    turns: int = 0
    observations: int = 0
    over: bool = False
    reached_failure: bool = False
    whole: bool = True
    differences: list[Difference] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = _RecordedSession(self.trajectory.steps)
        failed = self.trajectory.outcome.fault is Fault.ENVIRONMENT
        self.reached_failure = failed and not self.trajectory.steps  # it failed in its reset

    async def run(self, episode: Episode) -> None:
        """Play the main line, then end as the record ended."""
        trajectory, outcome = self.trajectory, self.trajectory.outcome
        self.reached_failure = False
        self._observe(0, episode.messages)
        for turn, index in enumerate(self.line.steps, 1):
            observation = await self._act(episode, index)
            self.turns = turn
            self._observe(turn, observation)
            if episode.done and turn < len(self.line.steps):
                self.over, self.whole = True, False
                said = f"ends after turn {turn}"
                self._differ("ended", turn, f"{len(self.line.steps)} turns", said, f"{said}, the record goes on")
                return
        if episode.done:
            self.over = True
            return
        if outcome.fault is Fault.ENVIRONMENT:
            await self._fail_again(episode)
        self.over = True
        if outcome is Outcome.CONTEXT_OVERFLOW:
            raise ContextOverflow(trajectory.outcome_detail)
        if outcome is Outcome.EPISODE_TIMEOUT:
            raise EpisodeTimeout(trajectory.outcome_detail)
        self.whole = False
        if outcome.scored:
            ended = f"ends after turn {self.turns} ({outcome})"
            self._differ("ended", self.turns, ended, "goes on", f"the record {ended}, the replay goes on")
        raise _EndOfRecord

    async def _fail_again(self, episode: Episode) -> None:
        """Go where the environment failed; that it does not fail now is a difference."""
        trajectory = self.trajectory
        if self.line.unanswered is None and trajectory.steps:
            return  # it failed when the loop ended the episode: the record does not say how
        if self.line.unanswered is not None:
            self.reached_failure = True
            await self._act(episode, self.line.unanswered)
            self.reached_failure = False
        said = f"{trajectory.outcome}: {trajectory.outcome_detail}"
        turn = self.turns + 1 if trajectory.steps else 0
        self._differ("outcome", turn, said, "no failure", f"[-{_line(said)}-]{{+no failure+}}")

    async def _act(self, episode: Episode, index: int) -> list[Message]:
        message = self.trajectory.steps[index].message
        assert message is not None  # checked by main_line
        self.session.playing = index
        return await episode.step(dict(message))

    # ---- comparing ------------------------------------------------------------------------------------------------

    def _observe(self, turn: int, messages: Sequence[Message]) -> None:
        recorded = recorded_observation(self.trajectory, self.line, turn)
        if recorded is None:
            return
        self.observations += 1
        replayed = as_recorded(list(messages))
        if same(list(recorded), replayed) or (not self.line.plain and holds(recorded, replayed)):
            return
        self._differ("observation", turn, list(recorded), replayed, messages_diff(recorded, replayed))

    def compare_rewards(self, result: EpisodeResult) -> None:
        """Compare what each turn was given, and the totals where both episodes ended alike."""
        trajectory = self.trajectory
        played = set(self.line.steps[: self.turns])
        located = True
        for index, recorded in enumerate(trajectory.steps):
            last = index == len(trajectory.steps) - 1 and self.whole  # the loop may have ended the episode there
            if index not in played and not last:
                # An agent may let the conversation go on before it acts: then rewards sit where no action was said.
                located = located and not recorded.reward and not recorded.reward_parts
        if located:
            for turn, index in enumerate(self.line.steps[: self.turns], 1):
                self._compare_step(turn, index)
            if self.whole and trajectory.steps and len(trajectory.steps) - 1 not in played:
                self._compare_step(None, len(trajectory.steps) - 1)
        if not self.whole or not trajectory.outcome.scored:
            return
        found = {difference.what for difference in self.differences}
        if "reward" not in found:
            self._compare_number("reward", None, None, trajectory.reward, result.reward)
        if "reward_parts" not in found and not _close_parts(trajectory.reward_parts, result.reward_parts):
            self.compare("reward_parts", None, dict(trajectory.reward_parts), dict(result.reward_parts))
        self.compare("success", None, trajectory.success, result.success)
        self.compare("outcome", None, str(trajectory.outcome), str(result.outcome))

    def _compare_step(self, turn: int | None, index: int) -> None:
        recorded, replayed = self.trajectory.steps[index], self.session.steps[index]
        self._compare_number("reward", turn, index, recorded.reward, replayed.reward)
        if not _close_parts(recorded.reward_parts, replayed.reward_parts):
            self.compare("reward_parts", turn, dict(recorded.reward_parts), dict(replayed.reward_parts), index)
        errors = bool(recorded.metrics.get("action_error")), bool(replayed.metrics.get("action_error"))
        self.compare("action_error", turn, *errors, index)

    def _compare_number(
        self, what: What, turn: int | None, index: int | None, recorded: float | None, replayed: float | None
    ) -> None:
        if not _close(recorded, replayed):
            self.compare(what, turn, recorded, replayed, index)

    def compare(self, what: What, turn: int | None, recorded: Any, replayed: Any, index: int | None = None) -> None:
        """Note a difference where the two values are not the same JSON."""
        replayed = as_recorded(replayed)
        if not same(recorded, replayed):
            self._differ(what, turn, recorded, replayed, value_diff(recorded, replayed), index)

    def _differ(
        self, what: What, turn: int | None, recorded: Any, replayed: Any, diff: str, index: int | None = None
    ) -> None:
        if index is None and turn is not None and 1 <= turn <= len(self.line.steps):
            index = self.line.steps[turn - 1]
        self.differences.append(Difference(str(self.trajectory.id), turn, index, what, recorded, replayed, diff))


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _close_parts(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(_close(one[name], other[name]) for name in one)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
