"""What all episodes of one configuration share: the corpus, its index, the search, tables of tasks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from stepgym.env.task import Task
from stepgym.errors import UserError
from stepgym_search.corpus import Corpus, open_corpus
from stepgym_search.dataset import load_rows
from stepgym_search.document import Document
from stepgym_search.encyclopedia import SPLITS, EncyclopediaConfig, GeneratedQuestions, encyclopedia_file
from stepgym_search.retrievers import open_retriever
from stepgym_search.retrievers.batching import BatchedSearch

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that a search under way is given at the end; who interrupts a run does not wait for a server that hangs."""


class SearchShared:
    """Opened once per process and configuration by `SearchEnv.open_shared`.

    Args:
        retriever: Name, or name and fields, of what searches; None where nothing may be searched.
        corpus: A file of JSON lines; None for the generated encyclopedia, which is written where it does not lie yet.
        encyclopedia: What articles and questions are generated.
        datasets: The data set of each split that has one; empty for generated questions.

    Raises:
        UserError: The corpus or its index is missing or damaged, or a library is missing.
    """

    def __init__(
        self,
        *,
        retriever: str | Mapping[str, Any] | None,
        corpus: str | None,
        encyclopedia: EncyclopediaConfig,
        datasets: Mapping[str, str],
    ) -> None:
        self._encyclopedia = encyclopedia
        self._datasets = dict(datasets)
        self._corpus_path = corpus
        self._corpus: Corpus | None = None
        self._lock = threading.Lock()
        self._tables: dict[str, Sequence[Task]] = {}
        self._search: BatchedSearch | None = None
        if retriever is not None:
            try:
                self._search = BatchedSearch(open_retriever(retriever, self._open_corpus))
            except BaseException:
                self._close_corpus()
                raise

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises `UserError` for one that does not exist."""
        known = tuple(self._datasets) or SPLITS
        if split not in known:
            raise UserError(f"search: there is no split {split!r}; known: {', '.join(known)}")
        with self._lock:
            if split not in self._tables:
                self._tables[split] = (
                    load_rows(self._datasets[split], split)
                    if self._datasets
                    else GeneratedQuestions(self._encyclopedia, split)
                )
            return self._tables[split]

    async def search(self, query: str, k: int) -> list[Document]:
        """The documents that fit a query best. Queries of other episodes go along. Raises `RetrieverError`."""
        assert self._search is not None, "an environment that may not search does not"
        return await self._search.search(query, k)

    def close(self) -> None:
        """End the search and close index and corpus."""
        search, self._search = self._search, None
        if search is not None:
            if not search.close(PATIENCE):
                # A search that does not return reads from both: they go with the process.
                logger.warning("a search is still running; its index stays open")
                return
            search.retriever.close()
        self._close_corpus()

    def _open_corpus(self) -> Corpus:
        path = self._corpus_path
        if path is None and self._datasets:
            raise UserError(
                "search: a data set needs `corpus`, the JSON-lines file that its questions are answered from, or a "
                "retriever that has its own (`retriever: {kind: http, url: ...}`)"
            )
        self._corpus = open_corpus(path if path is not None else encyclopedia_file(self._encyclopedia))
        return self._corpus

    def _close_corpus(self) -> None:
        if self._corpus is not None:
            self._corpus.close()
            self._corpus = None
