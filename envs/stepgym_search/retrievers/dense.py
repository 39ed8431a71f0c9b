"""The retriever `dense`: sentence embeddings, and FAISS to find the nearest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from stepgym.errors import EnvError, UserError
from stepgym_search.corpus import Corpus
from stepgym_search.document import Document
from stepgym_search.progress import LongWork
from stepgym_search.retrievers.base import RetrieverError
from stepgym_search.retrievers.encoder import Encoder, Vectors
from stepgym_search.retrievers.index_folder import open_index_folder
from stepgym_search.retrievers.passages import passages_of
from stepgym_search.retrievers.vectors import VectorIndex, faiss_library, write_flat, write_hnsw

INDEX_FILE = "vectors.index"
PASSAGES_AT_ONCE = 8192
"""Passages that are read and embedded before their vectors are written."""
LEAST_COSINE = 0.9
"""How like a stored vector must be to what the model makes of the passage now."""

_FORM = 1  # of the files in the folder; a change makes old folders be built anew


class DenseRetriever:
    """Finds passages by meaning: those whose embeddings have the largest inner product with the query's.

    Embeddings are computed once for a corpus and a model, chunk by chunk, and written as a FAISS index; the flat one is
    never held in memory, so the corpus may be larger than that. Opening it maps the file, which processes then share.
    The threads of torch and FAISS are left as the process has them. Every query has nearest passages, however far they
    are; one without a word in it finds nothing. Queries and passages longer than the model reads are cut by it. Safe to
    search from several threads; not after a fork, which torch does not survive.

    An index that others made, such as `e5_Flat.index` for wiki-18, is taken as it is: its row i must be passage i of
    the corpus. As many rows as passages, the model's dimension, and the vectors of three passages are checked.

    Args:
        corpus: What is searched.
        model: An embedding model that sentence-transformers can load: a name on the hub, or a folder.
        query_prefix: What stands before a query. None takes the model's own prompt, else what models of that name want
            (E5: `query: ` and `passage: `, as in Search-R1), else nothing.
        passage_prefix: What stands before a passage, likewise.
        batch_size: Texts embedded at once.
        device: Where they are embedded, as `cuda:1`; None takes a GPU where there is one.
        normalize: Whether embeddings are made of length 1.
        index: What is built: `flat` compares with every passage, exactly; `hnsw` walks a graph, which is much faster,
            now and then misses a passage, and is built in memory.
        index_path: The folder of the index, built where it is not there, by default one under `stepgym.home`; or the
            file of a FAISS index that others made.
        index_parameters: How to search it, in FAISS's words, as `efSearch=256` or, for an inverted file, `nprobe=64`.

    Raises:
        UserError: A library is missing, the model cannot be loaded, or the index is damaged or of something else.
    """

    needs_corpus: ClassVar[bool] = True

    def __init__(
        self,
        corpus: Corpus,
        *,
        model: str,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        batch_size: int = 64,
        device: str | None = None,
        normalize: bool = True,
        index: Literal["flat", "hnsw"] = "flat",
        index_path: str | None = None,
        index_parameters: str = "",
    ) -> None:
        self._corpus = corpus
        path = None if index_path is None else Path(index_path).expanduser().absolute()
        if path is not None and path.suffix in (".index", ".faiss") and not path.exists():
            # A folder of that name would be a surprise, and embedding a whole Wikipedia in it a bigger one.
            raise UserError(f"search: retriever: there is no index at {path}")
        faiss_library()
        self._encoder = Encoder(
            model,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
            batch_size=batch_size,
            device=device,
            normalize=normalize,
        )
        self._kind = index
        if path is None or not path.is_file():
            settings = {
                "form": _FORM,
                "model": self._encoder.digest,
                "passage_prefix": self._encoder.passage_prefix,
                "normalize": normalize,
                "index": index,
            }
            folder = open_index_folder(
                corpus,
                kind="dense",
                settings=settings,
                build=self._build,
                index_path=None if path is None else str(path),
            )
            path = folder / INDEX_FILE
        self._path = path
        self._index: VectorIndex | None = VectorIndex(path, index_parameters)
        self._check(self._index)

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The passages whose embeddings are nearest to each query's, nearest first, at most `k` of each.

        The score is the inner product, or minus the distance where the index has one that is not ours.

        Raises:
            RetrieverError: The query cannot be embedded, the corpus was changed, or the retriever is closed.
        """
        index = self._index
        if index is None:
            raise RetrieverError("search: this retriever is closed")
        found: list[list[Document]] = [[] for _ in queries]
        asked = [place for place, query in enumerate(queries) if query.strip()]
        if not asked or k < 1:
            return found
        vectors = self._encoder.encode_queries([queries[place] for place in asked])
        scores, rows = index.search(vectors, min(k, index.rows))
        if not np.isfinite(scores[rows >= 0]).all():
            raise RetrieverError(
                f"search: the index {self._path} is damaged: it has vectors that are no finite numbers"
            )
        for place, row_scores, row_numbers in zip(asked, scores.tolist(), rows.tolist(), strict=True):
            hits = ((row, score) for row, score in zip(row_numbers, row_scores, strict=True) if row >= 0)
            found[place] = passages_of(self._corpus, hits)
        return found

    def close(self) -> None:
        """Let go of the index."""
        self._index = None

    def _build(self, folder: Path) -> None:
        write = write_flat if self._kind == "flat" else write_hnsw
        try:
            write(folder / INDEX_FILE, self._encoder.dimension, self._embedded())
        except EnvError as error:  # the model cannot embed, or the corpus was changed meanwhile
            raise UserError(f"search: retriever: the index cannot be built: {error}") from error

    def _embedded(self) -> Iterator[Vectors]:
        """The embeddings of all passages in order, in chunks."""
        progress = LongWork(f"embedding {self._corpus.path}", len(self._corpus), "passages")
        for start in range(0, len(self._corpus), PASSAGES_AT_ONCE):
            passages = self._corpus[start : start + PASSAGES_AT_ONCE]
            yield self._encoder.encode_passages([document.contents for document in passages])
            progress.at(start + len(passages))

    def _check(self, index: VectorIndex) -> None:
        """Raise `UserError` unless the index is of this corpus and this model."""
        if index.rows != len(self._corpus):
            raise UserError(
                f"{self._path} has {index.rows} vectors, but {self._corpus.path} has {len(self._corpus)} passages: "
                "name the index of this corpus"
            )
        if index.dimension != self._encoder.dimension:
            raise UserError(
                f"{self._path} has vectors of {index.dimension} numbers, but the model {self._encoder.name} makes "
                f"{self._encoder.dimension}: name the model that the index was made with"
            )
        for row in sorted({0, index.rows // 2, index.rows - 1}):
            stored = index.vector(row)
            if stored is None:
                return
            made = self._encoder.encode_passages([self._corpus[row].contents])[0]
            length = float(np.linalg.norm(stored) * np.linalg.norm(made))
            cosine = float(stored @ made) / length if length else float(np.array_equal(stored, made))
            if not cosine >= LEAST_COSINE:
                raise UserError(
                    f"row {row} of {self._path} is not what the model {self._encoder.name} makes of passage {row} of "
                    f"{self._corpus.path} (cosine {cosine:.2f}): another corpus, model or passage_prefix"
                )
