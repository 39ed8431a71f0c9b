"""A conversation as it stood after one of its turns, and which messages go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepgym.model.renderer import Renderer, Turn
from stepgym.record.token_buffer import TokenBuffer


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation as it stood after one of its turns; any later call may go on from there.

    `messages` are copies, so that nothing an agent or an environment does to its own changes the record. `ids` holds,
    up to `length`, the ids from the first prompt to the last response. The text of a turn that another call went on
    from is let go, as texts of every turn would take memory quadratic in turns; a second call renders it again.

    Attributes:
        messages: All of it, the last answer included.
        turn: The last prompt and answer; None for an engine that speaks only chat.
        ids: A buffer that later turns may have added to.
        length: How many of `ids` are this conversation's.
        step: Index of the step that the last answer is.
        taken: Whether a call has gone on in `ids`, so that what follows there is that call's.
    """

    messages: Sequence[Mapping[str, Any]]
    turn: Turn | None
    ids: TokenBuffer
    length: int
    step: int
    taken: bool = False

    def last_turn(self, renderer: Renderer) -> Turn | None:
        """The last turn, with its text where the next prompt is told by it (`turns: continue` goes by ids alone)."""
        turn = self.turn
        if turn is None or turn.prompt_text or renderer.turns == "continue":
            return turn
        return replace(turn, prompt_text=renderer.template.apply(turn.messages, turn.tools, to_sample=True))

    def let_text_go(self) -> None:
        """Forget the text of the last prompt: another call has gone on from here."""
        if self.turn is not None:
            self.turn = replace(self.turn, prompt_text="")

    def going_on(self) -> TokenBuffer:
        """The ids, to be added to: the buffer itself for the first call that goes on from here, a copy for others.

        Calls may overlap, and a prompt may add nothing to the ids, so that their number does not tell.
        """
        if not self.taken:
            self.taken = True
            return self.ids
        fork = TokenBuffer(2 * self.length)
        fork.append(self.ids.prefix(self.length))
        return fork

    def starts(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it is how `messages` begin."""
        return len(messages) >= len(self.messages) and all(map(same_message, messages, self.messages))


def same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages say the same on the wire; our own fields may have been left out by the agent."""
    return one is other or one == other or wire_message(one) == wire_message(other)


def wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it goes over the wire, without the fields that only a session writes."""
    return {key: value for key, value in message.items() if key not in ("text", "invalid_tool_calls")}


def copy_message(value: Any) -> Any:
    """A copy of a message, or of what is in it, as deep as JSON goes."""
    if isinstance(value, Mapping):
        return {key: copy_message(item) for key, item in value.items()}
    return [copy_message(item) for item in value] if isinstance(value, (list, tuple)) else value
