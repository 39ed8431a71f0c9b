"""Texts as vectors, by a model of the library sentence-transformers."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.model.progress_bars import quiet_transformers
from stepgym_search.retrievers.base import RetrieverError
from stepgym_search.text import well_formed

Vectors = NDArray[np.float32]

_PRESETS = (
    # As the cards of these models have it, and Search-R1 does: https://huggingface.co/intfloat/e5-base-v2
    (r"(^|[^a-z0-9])e5([^a-z0-9]|$)(?!.*(instruct|mistral))", "query: ", "passage: "),
    # https://huggingface.co/BAAI/bge-base-en-v1.5
    (r"(^|[^a-z0-9])bge-.*-en([^a-z0-9]|$)", "Represent this sentence for searching relevant passages: ", ""),
)
_SAMPLED = 1024


class Encoder:
    """An embedding model, and what it wants before queries and passages. Safe to use from several threads.

    Args:
        model: Its name on the hub, or a folder.
        query_prefix: What stands before a query. None takes the model's own prompt `query`, else what models of that
            name want (E5: `query: ` and `passage: `; English BGE: a sentence before queries), else nothing.
        passage_prefix: What stands before a passage, likewise (`document` or `passage`).
        batch_size: Texts embedded at once.
        device: Where, as `cuda:1`; None takes a GPU where there is one.
        normalize: Whether vectors are made of length 1, so that inner products are cosines.

    Attributes:
        query_prefix: What stands before a query.
        passage_prefix: What stands before a passage.
        dimension: Length of a vector.

    Raises:
        UserError: A library is missing, or the model cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        batch_size: int = 64,
        device: str | None = None,
        normalize: bool = True,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"search: retriever: batch_size must be above 0, not {batch_size}")
        self.name = model
        self._batch_size = batch_size
        self._normalize = normalize
        self._model = _load(model, device)
        self._lock = threading.Lock()  # a fast tokenizer can be used by one thread at a time
        preset = _preset(model)
        prompts = {name: prompt for name, prompt in (self._model.prompts or {}).items() if prompt}
        own = (prompts.get("query"), prompts.get("document") or prompts.get("passage"))
        self.query_prefix = next(p for p in (query_prefix, own[0], preset[0]) if p is not None)
        self.passage_prefix = next(p for p in (passage_prefix, own[1], preset[1]) if p is not None)
        self.dimension = len(self._encode(["a"])[0])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """The vectors of queries, shape (texts, dimension). Raises `RetrieverError` if they cannot be computed."""
        return self._encode([self.query_prefix + well_formed(text) for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """The vectors of passages, shape (texts, dimension). Raises `RetrieverError` if they cannot be computed."""
        return self._encode([self.passage_prefix + well_formed(text) for text in texts])

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that say which model it is, wherever it lies: of samples of all its weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, len(flat) // _SAMPLED)].float().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.tobytes())
        digest.update(f"{[type(module).__name__ for module in self._model]} {self._model.max_seq_length}".encode())
        return digest.hexdigest()[:16]

    def _encode(self, texts: list[str]) -> Vectors:
        try:
            with self._lock:
                found = self._model.encode(
                    texts,
                    # Prefixes are written before the texts above; the model's default prompt would come in addition.
                    prompt="",
                    batch_size=self._batch_size,
                    normalize_embeddings=self._normalize,
                    show_progress_bar=False,
                    convert_to_numpy=True,
                )
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # out of memory on a GPU, say
            reason = " ".join(str(error).split())[:200]
            raise RetrieverError(f"the model {self.name} cannot embed: {type(error).__name__}: {reason}") from error
        vectors = np.ascontiguousarray(found, dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise RetrieverError(f"the model {self.name} gives vectors that are not finite numbers")
        return vectors


def _load(model: str, device: str | None) -> Any:
    if (model.startswith((".", "/", "~")) or model.count("/") > 1) and not Path(model).expanduser().is_dir():
        raise UserError(f"search: retriever: there is no folder of a model at {model}")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UserError(
            f"the retriever dense needs the package {error.name or 'sentence-transformers'!r}: "
            "pip install 'stepgym[search]'"
        ) from None
    path = Path(model).expanduser()
    try:
        with quiet_transformers():
            return SentenceTransformer(str(path) if path.is_dir() else model, device=device)
    except Exception as error:  # whatever is in the folder, or whatever keeps the hub from answering
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"search: retriever: cannot load the model {model!r}: {reason}") from error


def _preset(model: str) -> tuple[str, str]:
    """The prefixes that models of that name want. In the hub's cache the name is in the name of a folder above."""
    parts = Path(model.lower()).parts
    name = next((part for part in parts if part.startswith("models--")), parts[-1] if parts else "")
    for pattern, query, passage in _PRESETS:
        if re.search(pattern, name):
            return query, passage
    return "", ""
