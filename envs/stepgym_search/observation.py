"""What the agent sees: the documents that a search found, and what it is told when an action is no good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, TypeAlias

from stepgym_search.document import Document
from stepgym_search.text import well_formed

ObservationFormat: TypeAlias = Literal["search-r1", "skyrl", "brief"]

INVALID_ACTION = (
    "My previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again."
)
INVALID_ACTION_BRIEF = "invalid: write <search></search> or <answer></answer>"
NOTHING_FOUND = "No document fits this query."
EMPTY_QUERY = "the query is empty"
SEARCH_REFUSED = "searching is not allowed here: give the answer"


def documents_text(documents: Sequence[Document], observation_format: ObservationFormat, max_chars: int) -> str:
    """The documents of one search as text, without the tags around it; empty where nothing was found.

    Args:
        documents: Best first.
        observation_format: `search-r1` and `skyrl` are the published wordings to the letter; `brief` is the contents,
            as they are.
        max_chars: Characters of a document's contents that are shown; what is cut ends in `…`.
    """
    shown = [_shown(document.contents, max_chars) for document in documents]
    if observation_format == "skyrl":
        return "".join(f"Doc {number}: {contents.strip()}\n" for number, contents in enumerate(shown, 1))
    if observation_format == "brief":
        return "\n".join(shown)
    split = [contents.partition("\n") for contents in shown]
    return "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, _, text) in enumerate(split, 1)).strip()


def wrap(body: str, observation_format: ObservationFormat) -> str:
    """What a search came to, in the tags of the protocol."""
    if observation_format == "skyrl":  # whose JSON escapes all but ASCII
        return f"\n<information>{json.dumps({'result': body})}</information>\n"
    if observation_format == "brief":
        return f"<information>{body}</information>"
    return f"\n\n<information>{body}</information>\n\n"


def error_text(error: str, observation_format: ObservationFormat) -> str:
    """What a search that was not made came to."""
    return error if observation_format == "brief" else f"Search error: {error}"


def invalid_action(observation_format: ObservationFormat) -> str:
    """What is said to a turn without an action: the sentence of Search-R1 (SkyRL says nothing), or a shorter one."""
    return INVALID_ACTION_BRIEF if observation_format == "brief" else f"\n{INVALID_ACTION}\n"


def _shown(contents: str, max_chars: int) -> str:
    if len(contents) > max_chars:
        contents = f"{contents[:max_chars]}…"
    return well_formed(contents)  # half a character cannot be encoded, and so not sent
