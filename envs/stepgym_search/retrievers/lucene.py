"""BM25 in Lucene, through pyserini: an index of our own making, of somebody else's, or one that pyserini offers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from stepgym.errors import UserError
from stepgym.plugins import unknown
from stepgym_search.corpus import Corpus
from stepgym_search.document import Document
from stepgym_search.progress import LongWork
from stepgym_search.retrievers.base import RetrieverError
from stepgym_search.retrievers.bm25 import MOST_WORDS, check_bm25
from stepgym_search.retrievers.index_folder import MANIFEST, open_index_folder
from stepgym_search.retrievers.java import INSTALL, JavaError, java
from stepgym_search.retrievers.passages import passages_of
from stepgym_search.text import well_formed

_FORM = 1  # of our own indexes; a change makes old folders be built anew
_BATCH = 1000  # passages that Java is given at a time
_MEMORY_MB = 256  # in which Lucene collects passages before it writes them


_searchers: dict[int, Any] = {}  # by number; Java's objects are made, used and let go in its thread only
_numbers = count()


class _Hit(NamedTuple):
    name: str
    score: float
    stored: str | None


class LuceneRetriever:
    """Okapi BM25 by Lucene through pyserini, with its defaults: English words (`Analyzer` says which), k1 0.9, b 0.4.

    Without `index_path` or `prebuilt` the index is built for the corpus, once, and holds no text: passages come from
    the corpus, those of equal score in its order. An index that somebody else made with pyserini is
    taken as it is: passages come from what it stores (`-storeRaw` or `-storeContents`); where it stores none, its ids
    have to be rows of the corpus. Scores are as pyserini gives them: four decimals, and a millionth less for each of
    those that tie. A query is a bag of words: what is syntax elsewhere (`AND`, `(`, `*`) is not here.

    Java runs in this process, started by the first retriever; `JavaThread` says which and how. Searches of
    several threads are done one after another, the queries of one search side by side. What needs no other part of
    pyserini than its classes for Java is done with these, as importing its search module loads torch.

    Args:
        corpus: What is searched; None for an index that stores its passages.
        k1: How much a word that a passage repeats counts more; 0 is not at all.
        b: How much a word in a longer passage counts less, from 0 (not at all) to 1.
        index_path: A Lucene index, or the folder of ours, built where it is not there; by default one under
            `stepgym.home`.
        prebuilt: The name of an index that pyserini offers (`wikipedia-dpr-100w`); it is downloaded once, to
            where pyserini keeps them (`PYSERINI_CACHE`).

    Raises:
        UserError: A setting is out of range; Java or pyserini is missing; the index is damaged, of another corpus, or
            cannot be downloaded.
    """

    needs_corpus: ClassVar[bool] = True

    def __init__(
        self,
        corpus: Corpus | None,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        index_path: str | None = None,
        prebuilt: str | None = None,
    ) -> None:
        check_bm25(k1, b)
        if prebuilt is not None and index_path is not None:
            raise UserError(
                "search: retriever pyserini: 'prebuilt' and 'index_path' are both given: an index is one of them"
            )
        self._corpus = corpus
        self._is_ours = prebuilt is None and not is_foreign_index(index_path)
        if prebuilt is not None:
            self._folder = _download(prebuilt)
        elif not self._is_ours:
            self._folder = Path(str(index_path)).expanduser().absolute()
        elif corpus is None:
            raise UserError("search: retriever pyserini: there is no corpus, and no index that has passages")
        else:
            self._folder = open_index_folder(
                corpus, kind="pyserini", settings=_settings(), build=self._build, index_path=index_path
            )
        self._number = next(_numbers)
        self._finalizer = weakref.finalize(self, java.later, partial(_close, self._number))
        self._finalizer.atexit = False
        try:
            self._rows, stores = java.call(lambda: self._open(k1, b), f"opening the index {self._folder}")
        except JavaError as error:
            raise UserError(f"{error}; it is damaged, or of another version of Lucene") from None
        if not self._is_ours and not stores and corpus is None:
            raise UserError(f"{self._folder} stores no passages: name the corpus that it was made of")

    @classmethod
    def has_passages(cls, fields: Mapping[str, Any]) -> bool:
        """Whether a config names an index that stores its passages, so that it needs no corpus. May start Java."""
        if fields.get("prebuilt") is not None:
            return True
        path = fields.get("index_path")
        if not is_foreign_index(path):
            return False
        folder = Path(str(path)).expanduser().absolute()
        try:
            return java.call(lambda: _stores_passages(folder), f"opening the index {folder}")
        except JavaError as error:
            raise UserError(f"{error}; it is damaged, or of another version of Lucene") from None

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The passages for each query, best first; see `Retriever.search`.

        Raises:
            RetrieverError: Lucene could not read the index, an id of it is no row of the corpus, the corpus was
                changed, or the retriever is closed.
        """
        texts = [well_formed(query) for query in queries]
        hits = java.call(lambda: self._hits(texts, min(k, self._rows)), f"searching {self._folder}")
        return [[self._document(hit) for hit in of_query] for of_query in hits]

    def close(self) -> None:
        """Close the index. Java stays; in a process that was forked from the one that opened it, so does the index."""
        if self._finalizer.detach() is not None and java.is_here:
            java.call(partial(_close, self._number), f"closing {self._folder}")

    # ---- in the thread of Java ------------------------------------------------------------------------------------

    def _open(self, k1: float, b: float) -> tuple[int, bool]:
        """Open the index. The number of passages, and whether they are stored."""
        from jnius import autoclass

        searcher = autoclass("io.anserini.search.SimpleSearcher")(str(self._folder))
        searcher.set_bm25(k1, b)
        _searchers[self._number] = searcher
        rows = int(searcher.get_total_num_docs())
        return rows, rows > 0 and _stored(searcher, 0) is not None

    def _hits(self, texts: Sequence[str], k: int) -> list[list[_Hit]]:
        searcher = _searchers.get(self._number)
        if searcher is None:
            raise RetrieverError("search: this retriever is closed")
        found: list[list[_Hit]] = [[] for _ in texts]
        if k <= 0:
            return found
        short = [number for number, text in enumerate(texts) if text.strip() and len(text) <= MOST_WORDS]
        if len(short) == 1:
            found[short[0]] = self._taken(searcher, searcher.search(texts[short[0]], k))
        elif short:
            for number, hits in _side_by_side(searcher, [(number, texts[number]) for number in short], k):
                found[number] = self._taken(searcher, hits)
        for number, text in enumerate(texts):
            if len(text) > MOST_WORDS:
                found[number] = self._taken(searcher, searcher.search(_cut(searcher, text), k))
        return found

    def _taken(self, searcher: Any, hits: Any) -> list[_Hit]:
        return [
            _Hit(str(hit.docid), float(hit.score), None if self._is_ours else _stored(searcher, hit.lucene_docid))
            for hit in hits
        ]

    # ---- anywhere -------------------------------------------------------------------------------------------------

    def _document(self, hit: _Hit) -> Document:
        if hit.stored is not None:
            return Document(hit.name, _contents(hit.stored), hit.score)
        corpus = self._corpus
        row = int(hit.name) if hit.name.isdecimal() else -1
        if corpus is None or not 0 <= row < len(corpus):
            raise RetrieverError(
                f"search: {self._folder} stores no passages, and its id {hit.name[:40]!r} is no row of the corpus: "
                "make the index with pyserini's -storeRaw"
            )
        return passages_of(corpus, [(row, hit.score)])[0]

    def _build(self, folder: Path) -> None:
        corpus = self._corpus
        assert corpus is not None
        what = f"building the index in {folder}"
        indexer = _Indexer(folder)
        try:
            try:
                java.call(indexer.open, what)
                written = self._fill(indexer, corpus, what)
            finally:
                java.call(indexer.release, what)
        except JavaError as error:
            raise UserError(f"{error}; is there room on the disk, and memory?") from None
        if written == 0:
            raise UserError(f"no passage of {corpus.path} has a word to search for")
        if written != indexer.given:
            raise UserError(f"Lucene took {written} of {indexer.given} passages of {corpus.path}; is the disk full?")

    @staticmethod
    def _fill(indexer: _Indexer, corpus: Corpus, what: str) -> int:
        passages = iter(corpus)
        progress = LongWork(f"indexing {corpus.path}", len(corpus), "passages")
        row = 0
        while batch := list(islice(passages, _BATCH)):
            # JSON escapes what is not ASCII: no text is at the mercy of the way to Java. Lucene takes no empty passage.
            texts = [
                json.dumps({"id": f"{row + place:010d}", "contents": document.contents})
                for place, document in enumerate(batch)
                if document.contents.strip()
            ]
            row += len(batch)
            java.call(partial(indexer.add, texts), what)
            progress.at(row)
        return java.call(indexer.close, what)


class _Indexer:
    """pyserini's indexer over a folder; used in the thread of Java."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._indexer: Any = None
        self.given = 0

    def open(self) -> None:
        """Begin an index.

        Raises:
            UserError: A library of pyserini's is missing.
        """
        try:
            from pyserini.index.lucene import LuceneIndexer
        except ImportError as error:
            raise UserError(f"search: the retriever pyserini needs a library: {error}; {INSTALL}") from None
        folder = str(self._folder)
        options = ["-index", folder, "-memoryBuffer", str(_MEMORY_MB)]
        self._indexer = LuceneIndexer(folder, args=options, threads=os.cpu_count() or 1)

    def add(self, texts: list[str]) -> None:
        self._indexer.add_batch_raw(texts)
        self.given += len(texts)

    def close(self) -> int:
        """Write everything. How many passages the index has."""
        from jnius import autoclass

        indexer, self._indexer = self._indexer, None
        indexer.close()
        searcher = autoclass("io.anserini.search.SimpleSearcher")(str(self._folder))
        try:
            return int(searcher.get_total_num_docs())
        finally:
            searcher.close()

    def release(self) -> None:
        """End a build that did not come to its end: nothing writes to the folder any more."""
        from jnius import JavaException

        indexer, self._indexer = self._indexer, None
        if indexer is not None:
            with contextlib.suppress(JavaException):  # what is wrong has been said already
                indexer.close()


def is_foreign_index(path: str | None) -> bool:
    """Whether a folder holds a Lucene index that we did not make."""
    if path is None:
        return False
    folder = Path(path).expanduser()
    return folder.is_dir() and not (folder / MANIFEST).exists() and any(folder.glob("segments_*"))


def _close(number: int) -> None:
    searcher = _searchers.pop(number, None)
    if searcher is not None:
        searcher.close()


def _side_by_side(searcher: Any, numbered: Sequence[tuple[int, str]], k: int) -> list[tuple[int, Any]]:
    from jnius import autoclass

    array_list = autoclass("java.util.ArrayList")
    texts, names = array_list(), array_list()
    for number, text in numbered:
        texts.add(text)
        names.add(str(number))
    results = searcher.batch_search(texts, names, k, os.cpu_count() or 1)
    return [(int(entry.getKey()), entry.getValue()) for entry in results.entrySet().toArray()]


def _cut(searcher: Any, text: str) -> Any:
    """The query for a long text, of its first 1024 different words: Lucene raises for one of more."""
    from jnius import autoclass

    analyzed = autoclass("io.anserini.analysis.AnalyzerUtils").analyze(searcher.get_analyzer(), text)
    words = Counter(str(word) for word in analyzed.toArray())
    term, term_query = autoclass("org.apache.lucene.index.Term"), autoclass("org.apache.lucene.search.TermQuery")
    boost = autoclass("org.apache.lucene.search.BoostQuery")
    should = autoclass("org.apache.lucene.search.BooleanClause$Occur").SHOULD
    builder = autoclass("org.apache.lucene.search.BooleanQuery$Builder")()
    for word, times in islice(words.items(), MOST_WORDS):
        builder.add(boost(term_query(term("contents", word)), float(times)), should)
    return builder.build()


def _settings() -> dict[str, Any]:
    # k1 and b belong to the search, not to the index.
    return {"form": _FORM, "analyzer": "pyserini's default: English, Porter's stemmer, Lucene's stop words"}


def _stores_passages(folder: Path) -> bool:
    from jnius import autoclass

    searcher = autoclass("io.anserini.search.SimpleSearcher")(str(folder))
    try:
        return _stored(searcher, 0) is not None
    finally:
        searcher.close()


def _stored(searcher: Any, number: int) -> str | None:
    """What an index stores of a passage, by Lucene's number: the text as it was given, or its contents."""
    stored = searcher.doc_raw(number)
    if stored is None:
        stored = searcher.doc_contents(number)
    return None if stored is None else str(stored)


def _contents(stored: str) -> str:
    """The contents of what an index stores: of a JSON collection an object with `contents`, of others the very text."""
    if stored.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            contents = json.loads(stored).get("contents")
            if isinstance(contents, str):
                return well_formed(contents)
    return stored


def _download(name: str) -> Path:
    """The folder of an index that pyserini offers, downloaded if it is not there."""

    def download() -> str:
        from pyserini.prebuilt_index_info import TF_INDEX_INFO
        from pyserini.util import download_prebuilt_index

        if name not in TF_INDEX_INFO:
            raise UserError(f"search: retriever pyserini: {unknown('prebuilt index', name, TF_INDEX_INFO)}")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it prints
                return str(download_prebuilt_index(name, verbose=False))
        except Exception as error:  # whatever a download can end in: no network, a broken archive, a full disk
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"search: the index {name} cannot be downloaded: {reason}; name one that is there as index_path"
            ) from None

    return Path(java.call(download, f"downloading the index {name}"))
