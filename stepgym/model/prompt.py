"""A prompt to sample from."""

from __future__ import annotations

from dataclasses import dataclass

from stepgym.record.step import Ids

OPEN_TURN = ("continued", "turn_reopened")
"""What `Step.rendering` says of prompts that stand inside an open assistant turn (`turns: continue`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt to sample from.

    Attributes:
        text: What the template made of the messages; inside an open turn the observation alone, before it is cut.
        new_ids: int32 ids to add to the previous turn's prompt and response, or the whole prompt if not `extends`.
        extends: Whether the previous turn's ids stay, all of them.
        rendering: `first`, `extended`, `appended`, `continued`, `turn_reopened`, or why it was rendered anew (see
            `Step.rendering`).
        opener: The end of the prompt that leaves reasoning open; "" where none is.
        reasoning_open: Whether sampling begins inside reasoning: the prompt ends in an opener, or in an open turn the
            model itself left its reasoning open. What an observation says opens and closes nothing.
    """

    text: str
    new_ids: Ids
    extends: bool
    rendering: str
    opener: str = ""
    reasoning_open: bool = False

    @property
    def in_open_turn(self) -> bool:
        """Whether it goes on inside the assistant turn that an earlier prompt opened."""
        return self.rendering in OPEN_TURN
