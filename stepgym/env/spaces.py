"""Gymnasium spaces for messages. `gymnasium.spaces.Text` refuses natural language, so these are our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from stepgym.env.messages import Message, assistant, user

_WORDS = ("look", "answer", "naïve", "数", "…", "42", "<tag>", "yes", "no", "\n")
_ROLES = ("system", "user", "assistant", "tool")


class _TextLike(spaces.Space[Any]):
    """What the two spaces share: no array shape, equality by type, sentences as samples."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def _sentence(self) -> str:
        count = int(self.np_random.integers(1, 8))
        return " ".join(_WORDS[i] for i in self.np_random.integers(0, len(_WORDS), size=count))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def to_jsonable(self, sample_n: Any) -> list[Any]:
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        return list(sample_n)


class MessageSpace(_TextLike):
    """Actions: one assistant message, or a string that stands for one."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Message:
        """An assistant message that says a few words in no particular order."""
        return assistant(self._sentence())

    def contains(self, x: Any) -> bool:
        """Whether `x` is text or an assistant message."""
        if isinstance(x, str):
            return True
        return (
            isinstance(x, Mapping)
            and x.get("role", "assistant") == "assistant"
            and isinstance(x.get("content"), str | None)
        )


class ConversationSpace(_TextLike):
    """Observations: the list of new messages."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> list[Message]:
        """One user message that says a few words in no particular order."""
        return [user(self._sentence())]

    def contains(self, x: Any) -> bool:
        """Whether `x` is a list of messages with known roles."""
        return isinstance(x, (list, tuple)) and all(
            isinstance(message, Mapping) and message.get("role") in _ROLES for message in x
        )
