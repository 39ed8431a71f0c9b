"""What every retriever does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from stepgym.errors import EnvError
from stepgym_search.document import Document


class RetrieverError(EnvError):
    """A search failed through no fault of the agent's (a server that is gone): infrastructure, never reward."""


class QueryRefused(RetrieverError):
    """A server works, but not for this request: a query in it is too long for it, say. Others may fare better."""


@runtime_checkable
class Retriever(Protocol):
    """Finds the passages of a corpus that fit a query.

    A class that does this is made with a `Corpus` (or None where `needs_corpus` is false) and keyword-only fields,
    which are its config.

    Attributes:
        needs_corpus: Whether it searches a corpus here; a server elsewhere has its own.
    """

    needs_corpus: ClassVar[bool]

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The passages for each query, best first.

        Args:
            queries: Any text, in any script; one that has no word to look for finds nothing.
            k: Most passages for each. Fewer come back where fewer fit, none where nothing does.

        Raises:
            RetrieverError: The search could not be made.
        """
        ...

    def close(self) -> None:
        """Give back what is held open."""
        ...
