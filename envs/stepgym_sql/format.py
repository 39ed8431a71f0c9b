"""The tags of SkyRL-SQL: finding the action in a turn, and checking the format of an episode.

Only what the assistant wrote is looked at. Tags inside observations (which may hold anything that a database holds)
and inside the prompt count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

STOP = ("</sql>", "</solution>")

_CLOSING = re.compile(r"</(sql|solution)>")
_FORBIDDEN_IN_SOLUTION = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_OBSERVATION_END = re.compile(r"</observation>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TagAction:
    """One action: `sql` looks, `solution` finishes."""

    name: Literal["sql", "solution"]
    query: str


def cut_at_stop(text: str) -> str:
    """The text up to and including the first `</sql>` or `</solution>`: what was written before generation stopped."""
    closing = _CLOSING.search(text)
    return text if closing is None else text[: closing.end()]


def parse_action(text: str) -> TagAction | None:
    """The action that a turn ends in, or None.

    The query is what stands between the first closing tag and the opening tag nearest before it, so that a tag
    mentioned in the reasoning does no harm.
    """
    closing = _CLOSING.search(text)
    if closing is None:
        return None
    name: Literal["sql", "solution"] = "sql" if closing.group(1) == "sql" else "solution"
    opening = text.rfind(f"<{name}>", 0, closing.start())
    if opening < 0:
        return None
    return TagAction(name, text[opening + len(name) + 2 : closing.start()].strip())


def is_well_formed(turns: Sequence[str]) -> bool:
    """Whether an episode's assistant turns keep the format of SkyRL-SQL.

    Exactly one `<solution>…</solution>`, a `<think>…</think>` before it, no think, sql or observation tag inside it,
    and `<think>` as the first thing after each observation (one that the assistant made up itself included).

    Args:
        turns: What the assistant wrote, turn by turn; between two turns stood an observation.
    """
    written = "".join(turns)
    if written.count("<solution>") != 1:
        return False
    before, after = written.split("<solution>")
    if after.count("</solution>") != 1 or "</solution>" in before:
        return False
    if _FORBIDDEN_IN_SOLUTION.search(after.split("</solution>")[0]):
        return False
    if not _THINK.search(before):
        return False
    transcript = "</observation>".join(turns)
    head = transcript[: transcript.index("<solution>")]
    return all(head[end.end() :].lstrip().lower().startswith("<think>") for end in _OBSERVATION_END.finditer(head))
