"""What can go wrong, and whose fault it is.

Every error that a user may see is one line that says what, where and what to do. The command line turns a
`StepgymError` into that line and an exit code; rollouts turn it into an `Outcome`. Nothing else is caught silently.
"""

from __future__ import annotations

from typing import Literal

ActionStatus = Literal["ok", "no_action", "malformed"]


class StepgymError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line exits with."""

    exit_code = 1


class UserError(StepgymError):
    """Bad input: an unknown field, a missing file, a model without a chat template. Exit code 2, no traceback."""

    exit_code = 2


class ActionError(StepgymError):
    """Something the agent did wrong. `Env.step` turns it into an observation; it costs a turn.

    Args:
        message: What the agent is told.
        status: The status of the step it belongs to: `ok` (a well-formed action that failed), `no_action`
            (the turn held no action), `malformed` (an action that does not parse or does not fit its schema).
    """

    def __init__(self, message: str, *, status: ActionStatus = "ok") -> None:
        super().__init__(message)
        self.status: ActionStatus = status


class ContextOverflow(StepgymError):
    """The prompt, or the prompt and its response, do not fit the context. The fault of the budget, not of the agent."""


class EpisodeTimeout(StepgymError):
    """The episode ran out of its time. The fault of the budget, not of the agent."""


class EngineError(StepgymError):
    """The model could not be reached or answered with garbage: infrastructure, never reward."""


class EngineTimeout(EngineError):
    """The model did not answer in time: infrastructure, never reward."""


class EnvError(StepgymError):
    """The environment failed for a reason that is not the agent's."""


class EnvTimeout(EnvError):
    """An environment call did not return within the watchdog's limit."""


class UnscorableTask(EnvError):
    """The task itself cannot be scored (an empty gold answer, say). Never retried: another attempt would fail alike."""
