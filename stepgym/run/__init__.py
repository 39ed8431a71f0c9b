"""What happens: sessions, episodes, agents and rollouts. `AGENTS` finds an agent by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.run.agent import Agent

AGENTS: Registry[type[Agent]] = Registry("agent", {"chat": "stepgym.run.agent:ChatAgent"}, group="stepgym.agents")

__all__ = ["AGENTS"]
