"""Which of a trajectory's turns the environment was given, and what it answered: the main line.

A trajectory may hold side conversations (sub-agents, a critic) that the environment never saw. The episode notes in
the record which step said each action (`ENV_TURN`), so nothing has to be guessed; where the notes do not tell, nothing
is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgym.errors import StepgymError
from stepgym.record.trajectory import Trajectory
from stepgym.run.episode import ENV_TURN

PLAIN_LOOP = "stepgym.run.agent:ChatAgent"
"""The agent as provenance has it that adds no messages of its own."""


class NotReplayableError(StepgymError):
    """The record does not say what the environment was given; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class MainLine:
    """The actions of an episode.

    Attributes:
        steps: Index of the step that said each answered action, in the order of the environment's turns.
        unanswered: Index of the step whose message the environment was given last and never answered (it failed);
            None where there is none.
        plain: Whether the agent was the plain loop, so that a step's new messages are the environment's alone.
    """

    steps: tuple[int, ...]
    unanswered: int | None = None
    plain: bool = True


def main_line(trajectory: Trajectory) -> MainLine:
    """The main line of a trajectory. Raises `NotReplayableError` where the record does not tell."""
    turns = trajectory.metrics.get("turns")
    if turns is None:
        raise NotReplayableError("the record does not say how many turns the environment had")
    steps = trajectory.steps
    said: dict[int, int] = {}
    for index, step in enumerate(steps):
        turn = step.metrics.get(ENV_TURN)
        if turn is None:
            continue
        if int(turn) in said:
            raise NotReplayableError(f"two steps are noted as the environment's turn {int(turn)}")
        said[int(turn)] = index
    answered = int(turns)
    missing = next((turn for turn in range(1, answered + 1) if turn not in said), None)
    if missing is not None:
        raise NotReplayableError(
            f"no step is noted as the environment's turn {missing}: the agent acted with a message of its own, or the "
            "record was not made by an episode"
        )
    beyond = [turn for turn in said if not 1 <= turn <= answered + 1]
    if beyond:
        raise NotReplayableError(f"a step is noted as turn {beyond[0]}, but the environment had {answered}")
    line = tuple(said[turn] for turn in range(1, answered + 1))
    unanswered = said.get(answered + 1)
    for index in (*line, *(() if unanswered is None else (unanswered,))):
        if steps[index].message is None:
            raise NotReplayableError(f"step {index} has no message")
    agent = trajectory.provenance.get("agent", PLAIN_LOOP)
    return MainLine(line, unanswered, plain=agent == PLAIN_LOOP)


def recorded_observation(trajectory: Trajectory, line: MainLine, turn: int) -> Sequence[Mapping[str, Any]] | None:
    """What the model was told after the environment's turn `turn` (0: when the episode began).

    None where no step of the record shows it, as after the last turn. Where the agent was not the plain loop the
    messages may hold some of the agent's own.
    """
    steps = trajectory.steps
    following = line.steps[turn] if turn < len(line.steps) else line.unanswered
    if turn == 0:
        if following is None:
            following = 0 if steps and line.plain else None
        while following is not None:
            before = steps[following].follows
            if before is None or not 0 <= before < following:
                break
            following = before
    elif following is None or steps[following].follows != line.steps[turn - 1]:
        after = line.steps[turn - 1]
        followers = (index for index, step in enumerate(steps) if step.follows == after)
        following = next(followers, None) if line.plain else None
    return None if following is None else steps[following].new_messages
