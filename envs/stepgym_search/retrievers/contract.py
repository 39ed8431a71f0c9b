"""The JSON of Search-R1's `/retrieve`, as our server writes it and our client reads it.

A request is `{"queries": [..], "topk": 3, "return_scores": true}`; SkyRL's servers take one `"query"` instead. The
answer is `{"result": [[{"document": {"id", "contents"}, "score": x}, ...], ...]}`, one list for each query, and without
`return_scores` the documents alone in place of the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepgym_search.document import Document
from stepgym_search.text import well_formed

DEFAULT_TOPK = 3


def request_json(queries: Sequence[str], k: int, *, return_scores: bool) -> dict[str, Any]:
    """A request of the original form, with all queries in one."""
    return {"queries": list(queries), "topk": k, "return_scores": return_scores}


def single_request_json(query: str, k: int, *, return_scores: bool) -> dict[str, Any]:
    """A request of SkyRL's form, with one query."""
    return {"query": query, "topk": k, "return_scores": return_scores}


def result_json(found: Sequence[Sequence[Document]], *, scores: bool) -> dict[str, Any]:
    """The answer to a request, with scores or without."""

    def entry(document: Document) -> dict[str, Any]:
        fields = {"id": document.id, "contents": document.contents}
        return {"document": fields, "score": document.score} if scores else fields

    return {"result": [[entry(document) for document in documents] for documents in found]}


def read_result(answer: object, queries: int) -> list[list[Document]]:
    """The documents of an answer, for each query.

    A document may have `text`, and a `title`, in place of `contents`; one without an `id` gets an empty one. Scores
    that are missing are 0.

    Args:
        answer: The JSON of the answer.
        queries: How many queries there were.

    Raises:
        ValueError: It is no such answer; the message says in a few words what is wrong.
    """
    result = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(result, list):
        raise ValueError("no list 'result' in it")
    if len(result) != queries:
        raise ValueError(f"{len(result)} results for {queries} {'query' if queries == 1 else 'queries'}")
    found = []
    for place, entries in enumerate(result):
        if not isinstance(entries, list):
            raise ValueError(f"result {place} is no list of documents")
        found.append([_document(entry, f"result {place}, document {rank}") for rank, entry in enumerate(entries)])
    return found


def _document(entry: object, where: str) -> Document:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}, is no object")
    fields: object = entry.get("document", entry)
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}, is no object")
    contents = fields.get("contents")
    if contents is None and isinstance(text := fields.get("text"), str):
        title = fields.get("title")
        contents = f"{' '.join(title.split())}\n{text}" if isinstance(title, str) else text
    if not isinstance(contents, str):
        raise ValueError(f"{where}, has no text 'contents'")
    name = fields.get("id")
    return Document("" if name is None else well_formed(str(name)), well_formed(contents), _score(entry, where))


def _score(entry: Mapping[str, Any], where: str) -> float:
    score = entry.get("score")
    if score is None:
        return 0.0
    if isinstance(score, int | float) and not isinstance(score, bool):
        try:
            if math.isfinite(score):
                return float(score)
        except OverflowError:
            pass  # a whole number with hundreds of digits
    raise ValueError(f"{where}, has a score that is no finite number")
