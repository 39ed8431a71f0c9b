"""The passages of the rows that a search found."""

from __future__ import annotations

from collections.abc import Iterable

from stepgym.errors import EnvError
from stepgym_search.corpus import Corpus
from stepgym_search.document import Document
from stepgym_search.retrievers.base import RetrieverError


def passages_of(corpus: Corpus, found: Iterable[tuple[int, float]]) -> list[Document]:
    """The passages of rows, with their scores.

    Args:
        corpus: What the rows are of.
        found: Row and score of each.

    Raises:
        RetrieverError: The corpus was changed or closed, or has no such row.
    """
    try:
        rows = [(corpus[row], score) for row, score in found]
    except IndexError as error:
        raise RetrieverError(f"search: the index does not fit the corpus: {error}") from None
    except EnvError as error:
        raise RetrieverError(f"search: {error}") from None
    return [Document(document.id, document.contents, score) for document, score in rows]
