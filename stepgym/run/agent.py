"""Agents: what takes an episode from its first message to its last."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from stepgym.run.episode import Episode


@runtime_checkable
class Agent(Protocol):
    """Anything with this method is an agent. The rollout opens the episode before and closes it after."""

    async def run(self, episode: Episode) -> None:
        """Play the episode to its end: chat through `episode.session`, act through `episode.step`.

        What it raises becomes the outcome `agent_error`; failures of model and environment stand even if it swallows
        them.
        """


class ChatAgent:
    """The plain loop: the model answers the conversation, the environment answers the model, until it is over."""

    async def run(self, episode: Episode) -> None:
        """Alternate between `session.chat` and `episode.step` until the episode is done."""
        tools, stop = episode.tools, episode.stop
        while not episode.done:
            message = await episode.session.chat(episode.messages, tools=tools, stop=stop)
            await episode.step(message)
