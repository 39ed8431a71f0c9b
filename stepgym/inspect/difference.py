"""Where a replay differs from the record, in a line that a person can read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stepgym.record.json_text import dump_json, load_json

What = Literal["observation", "reward", "reward_parts", "action_error", "success", "ended", "outcome", "tools"]

_CONTEXT = 24
_SHOWN = 120
_CHANGING = re.compile(r"0[xX][0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was not the same again.

    Attributes:
        trajectory: The trajectory's id, as text.
        turn: The environment's turn, from 1; 0 for what it said when the episode began; None for the whole episode.
        step: Index of the step that said the turn's action; None where there is none.
        what: What differs.
        recorded, replayed: Both values, as JSON.
        diff: One line: what is the same around it, `[-recorded-]` and `{+replayed+}`.
    """

    trajectory: str
    turn: int | None
    step: int | None
    what: What
    recorded: Any
    replayed: Any
    diff: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def as_recorded(value: Any) -> Any:
    """A value as the store would give it back, so that both sides of a comparison went the same way."""
    return load_json(dump_json(value))


def same(recorded: Any, replayed: Any) -> bool:
    """Whether two values are the same JSON; the order of keys does not count."""
    return dump_json(recorded, sort_keys=True) == dump_json(replayed, sort_keys=True)


def holds(messages: Sequence[Any], part: Sequence[Any]) -> bool:
    """Whether `part` stands in `messages`, in one piece."""
    wanted = [dump_json(message, sort_keys=True) for message in part]
    found = [dump_json(message, sort_keys=True) for message in messages]
    return any(found[start : start + len(wanted)] == wanted for start in range(len(found) - len(wanted) + 1))


def messages_diff(recorded: Sequence[Mapping[str, Any]], replayed: Sequence[Mapping[str, Any]]) -> str:
    """One line about the first message that differs."""
    for number, (one, other) in enumerate(zip(recorded, replayed, strict=False), 1):
        if same(one, other):
            continue
        name = next((key for key in {**one, **other} if not same(one.get(key), other.get(key))), "")
        before = f"message {number} of {len(recorded)}, {name}: " if len(recorded) > 1 else f"{name}: "
        line = before + value_diff(one.get(name), other.get(name))
        if len(recorded) != len(replayed):
            line += f" ({_messages(len(recorded))} recorded, {len(replayed)} replayed)"
        return line
    return f"[-{_messages(len(recorded))}-]{{+{_messages(len(replayed))}+}}"


def value_diff(recorded: Any, replayed: Any) -> str:
    """One line about two values: only what differs, with a little of what is the same around it."""
    one, other = _text(recorded), _text(replayed)
    start = _shared(one, other)
    end = _shared(one[start:][::-1], other[start:][::-1])
    # A change inside a number or a word is read more easily with the whole of it.
    for _ in range(_CONTEXT):
        start -= bool(start and _inside(one[start - 1]))
        end -= bool(end and _inside(one[len(one) - end]))
    left, right = one[:start], one[len(one) - end :] if end else ""
    old, new = one[start : len(one) - end], other[start : len(other) - end]
    line = f"{_tail(left)}[-{_cut(old)}-]{{+{_cut(new)}+}}{_head(right)}"
    if isinstance(recorded, str) and isinstance(replayed, str) and _CHANGING.sub("0", one) == _CHANGING.sub("0", other):
        line += " (only numbers differ: a time, a duration, an address?)"
    return line


def _shared(one: str, other: str) -> int:
    """Number of leading characters that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _inside(character: str) -> bool:
    """Whether it stands inside a word or a number."""
    return character.isalnum() or character in "._"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump_json(value, sort_keys=True)


def _messages(count: int) -> str:
    return f"{count} message" if count == 1 else f"{count} messages"


def _tail(text: str) -> str:
    return text if len(text) <= _CONTEXT else "…" + text[-_CONTEXT:]


def _head(text: str) -> str:
    return text if len(text) <= _CONTEXT else text[:_CONTEXT] + "…"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"
