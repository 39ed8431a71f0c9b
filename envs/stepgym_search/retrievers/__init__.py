"""Retrievers by name. One of people's own is named `module:Class`, or registered in the group of entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stepgym.config import validate_kwargs
from stepgym.errors import UserError
from stepgym.plugins import Registry
from stepgym_search.corpus import Corpus
from stepgym_search.retrievers.base import Retriever

RETRIEVERS: Registry[type[Retriever]] = Registry(
    "retriever",
    {
        "bm25s": "stepgym_search.retrievers.bm25:BM25Retriever",
        "dense": "stepgym_search.retrievers.dense:DenseRetriever",
        "http": "stepgym_search.retrievers.remote:HTTPRetriever",
        "pyserini": "stepgym_search.retrievers.lucene:LuceneRetriever",
    },
    group="stepgym_search.retrievers",
)


def check_retriever(config: str | Mapping[str, Any]) -> tuple[type[Retriever], dict[str, Any]]:
    """The class that a config names, and the arguments to make one with.

    Args:
        config: A name (`bm25s`), or a mapping with the name as `kind` and the fields of that retriever.

    Raises `UserError` for an unknown name, or a field that is unknown or wrong.
    """
    fields = {"kind": config} if isinstance(config, str) else dict(config)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError("search: retriever: a 'kind' is missing, as in {kind: bm25s}")
    try:
        cls = RETRIEVERS.get(kind)
    except UserError as error:
        raise UserError(f"search: retriever: {error}") from None
    return cls, validate_kwargs(cls, fields, "search: retriever")


def open_retriever(config: str | Mapping[str, Any], corpus: Callable[[], Corpus]) -> Retriever:
    """Make the retriever that a config names; see `check_retriever`.

    Args:
        config: Name and fields.
        corpus: Opens the corpus; called only where the retriever searches one here, and has not its passages in an
            index (a class whose `has_passages(fields)` says so).
    """
    cls, fields = check_retriever(config)
    made: Any = cls
    has_passages: Callable[[Mapping[str, Any]], bool] | None = getattr(cls, "has_passages", None)
    needs_corpus = cls.needs_corpus and not (has_passages is not None and has_passages(fields))
    retriever: Retriever = made(corpus() if needs_corpus else None, **fields)
    return retriever
