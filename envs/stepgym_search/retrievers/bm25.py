"""BM25 in this process, with the library bm25s: an index on disk that all processes share."""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from stepgym.errors import UserError
from stepgym_search.corpus import Corpus
from stepgym_search.document import Document
from stepgym_search.progress import LongWork
from stepgym_search.retrievers.analyzer import Analyzer, StopWords
from stepgym_search.retrievers.base import RetrieverError
from stepgym_search.retrievers.index_folder import open_index_folder
from stepgym_search.retrievers.passages import passages_of
from stepgym_search.retrievers.vocabulary import Vocabulary

if TYPE_CHECKING:
    import bm25s

MOST_WORDS = 1024
"""Different words of a query that are looked for, its first ones. Lucene has the same limit."""

Scores: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

_BLOCK = 2048
_TOLD_PASSAGES = 1000
_FORM = 2  # of the files in the folder; a change makes old folders be built anew


class BM25Retriever:
    """Okapi BM25 as Lucene computes it (Kamphuis et al. 2020), over words that `Analyzer` finds.

    The index holds the score of each word in each passage (bm25s, Lù 2024). It is built once for a corpus and settings.
    It lies in files that are mapped into memory: it costs little to open, and is in memory once for all processes. A
    word that a query repeats counts as often. To build it takes memory of about six times its size (1.3 GB for a
    million short articles); a search takes time that grows with the corpus. Passages of equal score come in the order
    of the corpus; one that shares no word with the query is never found. Safe to use from many threads and after a
    fork.

    Args:
        corpus: What is searched.
        k1: How much a word that a passage repeats counts more; 0 is not at all.
        b: How much a word in a longer passage counts less, from 0 (not at all) to 1.
        stemmer: An algorithm of PyStemmer (`porter`, `german`, ...), or `none`.
        stop_words: `lucene`: its 33 English stop words are not looked for; `none`: every word is.
        index_path: The folder of the index, built where it is not there; by default one under `stepgym.home`.

    Raises:
        UserError: A setting is out of range, or the index is of another corpus, has other settings or is damaged.
    """

    needs_corpus: ClassVar[bool] = True

    def __init__(
        self,
        corpus: Corpus,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str = "porter",
        stop_words: StopWords = "lucene",
        index_path: str | None = None,
    ) -> None:
        check_bm25(k1, b)
        self._corpus = corpus
        self._analyzer = Analyzer(stemmer=stemmer, stop_words=stop_words)
        self._settings = {"form": _FORM, "k1": k1, "b": b, "stemmer": stemmer, "stop_words": stop_words}
        self._folder = open_index_folder(
            corpus, kind="bm25s", settings=self._settings, build=self._build, index_path=index_path
        )
        self._vocabulary, self._index = self._open()

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The passages for each query, best first; see `Retriever.search`.

        Raises:
            RetrieverError: The index turned out to be damaged, the corpus was changed, or the retriever is closed.
        """
        if self._index is None:
            raise RetrieverError("search: this retriever is closed")
        return [self._search(query, k) for query in queries]

    def close(self) -> None:
        """Let go of the index."""
        self._index = None
        self._vocabulary = None

    def _search(self, query: str, k: int) -> list[Document]:
        scores = self._scores(query)
        if scores is None or k <= 0:
            return []
        rows = best_rows(scores, k)
        return passages_of(self._corpus, zip(rows.tolist(), scores[rows].tolist(), strict=True))

    def _scores(self, query: str) -> Scores | None:
        """The score of every passage, or None where the corpus has no word of the query. Shape (rows,)."""
        vocabulary, index = self._vocabulary, self._index
        if vocabulary is None or index is None:
            raise RetrieverError("search: this retriever is closed")
        words = Counter(self._analyzer(query))
        by_count: dict[int, list[int]] = {}
        for word, count in list(words.items())[:MOST_WORDS]:
            number = vocabulary.number(word)
            if number is not None:
                by_count.setdefault(count, []).append(number)
        if not by_count:
            return None
        scores: Scores | None = None
        try:
            for count, numbers in by_count.items():
                part = index.get_scores_from_ids(numbers)
                part = part if count == 1 else part * np.float32(count)
                scores = part if scores is None else scores + part
            whole = scores is not None and math.isfinite(scores.max()) and scores.min() >= 0.0
        except (IndexError, ValueError):
            whole = False
        if not whole:
            raise RetrieverError(f"search: the index in {self._folder} is damaged; remove it and it is built again")
        return scores

    def _build(self, folder: Path) -> None:
        numbers: dict[str, int] = {}
        passages: list[array[int]] = []
        progress = LongWork(f"finding the words of {self._corpus.path}", len(self._corpus), "passages")
        for document in self._corpus:
            words = self._analyzer(document.contents)
            passages.append(array("i", [numbers.setdefault(word, len(numbers)) for word in words]))
            if len(passages) % _TOLD_PASSAGES == 0:
                progress.at(len(passages))
        if not numbers:
            raise UserError(f"no passage of {self._corpus.path} has a word to search for")
        ordered = Vocabulary.write(folder, numbers)
        places = np.empty(len(ordered), dtype=np.int32)
        places[[numbers[word] for word in ordered]] = np.arange(len(ordered), dtype=np.int32)
        numbers.clear()
        for row, passage in enumerate(passages):
            passages[row] = array("i", places[np.frombuffer(passage, dtype=np.int32)].tobytes())
        progress.then(f"scoring the {len(ordered):,} words of {len(passages):,} passages")
        index = _library().BM25(k1=self._settings["k1"], b=self._settings["b"], method="lucene", backend="numpy")
        index.index((passages, dict(enumerate(range(len(ordered))))), create_empty_token=False, show_progress=False)
        index.vocab_dict = {}  # ours is in the table
        index.save(folder, show_progress=False)

    def _open(self) -> tuple[Vocabulary | None, bm25s.BM25 | None]:
        library = _library()
        try:
            vocabulary = Vocabulary(self._folder)
            index = library.BM25.load(self._folder, mmap=True, load_vocab=False, show_progress=False)
            for name in ("indptr", "indices", "data"):
                index.scores[name] = np.asarray(index.scores[name])  # still mapped; a plain array is quicker to cut
            # A row below 0, where a file is damaged, would count from the end; so it is beyond it.
            index.scores["indices"] = index.scores["indices"].view(np.uint32)
            starts, rows, scores = (index.scores[name] for name in ("indptr", "indices", "data"))
            whole = (
                len(starts) == len(vocabulary) + 1
                and starts[0] == 0
                and starts[-1] == len(rows) == len(scores)
                and bool((np.diff(starts) >= 0).all())
                and index.scores["num_docs"] == len(self._corpus)
            )
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise UserError(f"the index in {self._folder} is damaged; remove it and it is built again")
        return vocabulary, index


def _library() -> Any:
    """The library bm25s, which would write its debugging lines wherever anybody listens to the log."""
    try:
        import bm25s
    except ImportError as error:
        raise UserError(
            f"search: the retriever bm25s needs the package {error.name!r}: pip install 'stepgym[search]'"
        ) from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def best_rows(scores: Scores, k: int) -> Rows:
    """The rows of the k largest scores above 0, best first, equal ones in order; fewer where fewer are above 0.

    Args:
        scores: Shape (rows,), none negative, all finite.
        k: At least 1.
    """
    # A row below the k-th best maximum of a block cannot be among the best k: one quick pass leaves few to sort.
    whole = len(scores) // _BLOCK * _BLOCK
    maxima = scores[:whole].reshape(-1, _BLOCK).max(axis=1)
    least = np.partition(maxima, len(maxima) - k)[len(maxima) - k] if len(maxima) >= k else np.float32(0)
    rows = np.flatnonzero(scores >= least) if least > 0 else np.flatnonzero(scores)
    found: Rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
    return found


def check_bm25(k1: float, b: float) -> None:
    """Check the parameters of BM25.

    Raises:
        UserError: k1 is negative or not finite, or b is not between 0 and 1.
    """
    if not (math.isfinite(k1) and k1 >= 0):
        raise UserError(f"search: retriever: k1 is {k1}: it is a number from 0 up, 0.9 as a rule")
    if not 0 <= b <= 1:
        raise UserError(f"search: retriever: b is {b}: it is a number from 0 to 1, 0.4 as a rule")
