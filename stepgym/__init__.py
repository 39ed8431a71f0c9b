"""stepgym: an agent-environment gym for language models, and a trainer that learns from its records.

Every model turn is recorded exactly as the model saw it. Names below are imported when they are first used, so
`import stepgym` loads neither torch nor transformers; it registers the installed environments with Gymnasium, as
strings, importing none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stepgym.env.registry import register_gymnasium

if TYPE_CHECKING:
    from stepgym.env.base import Env
    from stepgym.env.messages import Message
    from stepgym.env.registry import make
    from stepgym.env.task import Task
    from stepgym.env.tool_env import ToolEnv
    from stepgym.env.tools import tool
    from stepgym.errors import ActionError
    from stepgym.record.merge import merge_steps
    from stepgym.record.outcome import Outcome, OutcomePolicy, Treatment
    from stepgym.record.step import Step
    from stepgym.record.store import TrajectoryStore
    from stepgym.record.token_tree import TokenTree
    from stepgym.record.trajectory import Trajectory, TrajectoryId
    from stepgym.run.agent import Agent, ChatAgent
    from stepgym.run.episode import Episode
    from stepgym.run.evaluation import evaluate
    from stepgym.run.rollouts import rollout, rollout_stream
    from stepgym.run.session import Session

__version__ = "0.1.0"

__all__ = [
    "ActionError",
    "Agent",
    "ChatAgent",
    "Env",
    "Episode",
    "Message",
    "Outcome",
    "OutcomePolicy",
    "Session",
    "Step",
    "Task",
    "TokenTree",
    "ToolEnv",
    "Trajectory",
    "TrajectoryId",
    "TrajectoryStore",
    "Treatment",
    "evaluate",
    "make",
    "merge_steps",
    "rollout",
    "rollout_stream",
    "tool",
]

_HOMES = {
    "ActionError": "stepgym.errors",
    "Agent": "stepgym.run.agent",
    "ChatAgent": "stepgym.run.agent",
    "Env": "stepgym.env.base",
    "Episode": "stepgym.run.episode",
    "Message": "stepgym.env.messages",
    "Outcome": "stepgym.record.outcome",
    "OutcomePolicy": "stepgym.record.outcome",
    "Session": "stepgym.run.session",
    "Step": "stepgym.record.step",
    "Task": "stepgym.env.task",
    "TokenTree": "stepgym.record.token_tree",
    "ToolEnv": "stepgym.env.tool_env",
    "Trajectory": "stepgym.record.trajectory",
    "TrajectoryId": "stepgym.record.trajectory",
    "TrajectoryStore": "stepgym.record.store",
    "Treatment": "stepgym.record.outcome",
    "evaluate": "stepgym.run.evaluation",
    "make": "stepgym.env.registry",
    "merge_steps": "stepgym.record.merge",
    "rollout": "stepgym.run.rollouts",
    "rollout_stream": "stepgym.run.rollouts",
    "tool": "stepgym.env.tools",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stepgym' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_gymnasium()
