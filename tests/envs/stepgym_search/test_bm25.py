from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.corpus import Corpus, open_corpus
from stepgym_search.retrievers import bm25, check_retriever, index_folder, open_retriever
from stepgym_search.retrievers.analyzer import Analyzer
from stepgym_search.retrievers.base import Retriever, RetrieverError
from stepgym_search.retrievers.bm25 import BM25Retriever, best_rows

from stepgym.errors import UserError

EVERY_WORD = [f"w{n}" for n in range(200)]
INDEX_FILES = ["data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "vocabulary.bin"]


def corpus_of(path: Path, contents: list[str]) -> Corpus:
    path.write_text("".join(json.dumps({"id": f"d{n}", "contents": text}) + "\n" for n, text in enumerate(contents)))
    return open_corpus(path)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Three hundred passages of drawn words, some of which are the same."""
    rng = random.Random(3)
    words = [f"w{n}" for n in range(200)] + ["running", "the", "東京", "عربي", "😀"]
    contents = [f"Title {n % 250}\n" + " ".join(rng.choices(words, k=rng.randint(0, 40))) for n in range(299)]
    return corpus_of(tmp_path_factory.mktemp("drawn") / "drawn.jsonl", [*contents, contents[7]])


def okapi(corpus: Corpus, query: str, k1: float, b: float) -> dict[int, float]:
    """BM25 as Kamphuis et al. 2020 write Lucene's, word by word."""
    analyzer = Analyzer()
    passages = [Counter(analyzer(document.contents)) for document in corpus]
    lengths = [passage.total() for passage in passages]
    mean = sum(lengths) / len(lengths)
    scores: dict[int, float] = {}
    for word in analyzer(query):
        holders = sum(word in passage for passage in passages)
        idf = math.log(1 + (len(passages) - holders + 0.5) / (holders + 0.5))
        for row, passage in enumerate(passages):
            if word in passage:
                count = passage[word]
                part = idf * count / (count + k1 * (1 - b + b * lengths[row] / mean))
                scores[row] = scores.get(row, 0.0) + part
    return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.2, 0.75), (0.0, 0.0), (2.0, 1.0)])
def test_scores_are_those_of_the_formula_and_ties_come_in_order(drawn: Corpus, k1: float, b: float) -> None:
    retriever = BM25Retriever(drawn, k1=k1, b=b)
    for query in ("w1 w2 w3", "running Title 7", "w5 w5 w5 w9", "the 東京", "عربي 😀 w0", "Title"):
        expected = okapi(drawn, query, k1, b)
        (found,) = retriever.search([query], 20)
        rows = [int(document.id[1:]) for document in found]
        assert [document.score for document in found] == pytest.approx([expected[row] for row in rows], rel=1e-4)
        best = sorted(expected, key=lambda row: (-expected[row], row))[: len(rows)]
        assert [expected[row] for row in rows] == pytest.approx([expected[row] for row in best], rel=1e-4)
        assert len(found) == min(20, len(expected))
        for (row, first), (next_row, second) in zip(
            zip(rows, found, strict=True), list(zip(rows, found, strict=True))[1:], strict=False
        ):
            assert first.score > second.score or (first.score == second.score and row < next_row)
        assert [document.contents for document in found] == [drawn[row].contents for row in rows]


WORDS = st.sampled_from(["ala", "bok", "cim", "dor", "eft", "gun"])


@settings(max_examples=100, deadline=None)
@given(
    passages=st.lists(st.lists(WORDS, max_size=12), min_size=1, max_size=12).filter(any),
    query=st.lists(WORDS, min_size=1, max_size=8),
    k=st.integers(1, 15),
    k1=st.sampled_from([0.0, 0.5, 0.9, 2.0]),
    b=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_any_small_corpus_is_scored_by_the_formula(
    tmp_path_factory: pytest.TempPathFactory, passages: list[list[str]], query: list[str], k: int, k1: float, b: float
) -> None:
    folder = tmp_path_factory.mktemp("small")
    corpus = corpus_of(folder / "small.jsonl", [" ".join(words) for words in passages])
    retriever = BM25Retriever(corpus, k1=k1, b=b, index_path=str(folder / "index"))
    (found,) = retriever.search([" ".join(query)], k)
    expected = okapi(corpus, " ".join(query), k1, b)
    assert [document.score for document in found] == pytest.approx(sorted(expected.values(), reverse=True)[:k])
    assert {int(document.id[1:]): document.score for document in found} == pytest.approx(
        {int(document.id[1:]): expected[int(document.id[1:])] for document in found}
    )
    order = [(-document.score, int(document.id[1:])) for document in found]
    assert order == sorted(order)


def test_the_same_search_finds_the_same(drawn: Corpus) -> None:
    retriever: Retriever = open_retriever({"kind": "bm25s"}, lambda: drawn)
    queries = ["Title w1", "Title", "w3 w4", "", "nothing"]
    together = retriever.search(queries, 5)
    assert together == [retriever.search([query], 5)[0] for query in queries]
    assert BM25Retriever(drawn).search(queries, 5) == together
    for k in (1, 2, 3, 5, 8):
        assert [found[:k] for found in retriever.search(queries, 10)] == retriever.search(queries, k)


def test_k_beyond_the_corpus_and_none_at_all(drawn: Corpus) -> None:
    retriever = BM25Retriever(drawn)
    (everything,) = retriever.search(["Title"], 10_000)
    assert len(everything) == len(drawn)
    assert retriever.search(["Title"], 0) == [[]]
    assert retriever.search([], 3) == []
    # Passages that share no word are no hits, however many are asked for.
    (one,) = retriever.search(["Title 249"], 10_000)
    assert {document.id for document in one} == {document.id for document in everything}
    (few,) = retriever.search(["w17"], 10_000)
    assert 0 < len(few) < len(drawn)
    assert all(document.score > 0 for document in few)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "   ",
        "\n\t",
        "the of and",
        "\x00\x01\x02",
        "\ud83d",
        "?!…",
        "漢字仮名",
        "кириллица",
        "x" * 100_000,
        "\u202e\u200d",
    ],
)
def test_a_query_without_a_known_word_finds_nothing(drawn: Corpus, query: str) -> None:
    assert BM25Retriever(drawn).search([query], 3) == [[]]


def test_queries_in_other_scripts_and_very_long_ones_find_what_is_there(drawn: Corpus) -> None:
    retriever = BM25Retriever(drawn)
    unknown = " ".join(f"z{n}" for n in range(1023))
    for query in ("東京", "عربي", "😀", "\ud800 w1 \x00", "w1 " * 40_000, f"{unknown} w2"):
        (found,) = retriever.search([query], 3)
        assert len(found) == 3
        assert all(math.isfinite(document.score) and document.score > 0 for document in found)
    assert retriever.search([f"{unknown} z w2"], 3) == [[]]  # only the first 1024 different words are looked for


@settings(max_examples=150, deadline=None)
@given(query=st.text(max_size=50), k=st.integers(0, 400))
def test_any_query_gives_an_honest_answer(drawn: Corpus, query: str, k: int) -> None:
    (found,) = BM25Retriever(drawn).search([query], k)
    assert len(found) <= k
    scores = [document.score for document in found]
    assert scores == sorted(scores, reverse=True)
    assert all(math.isfinite(score) and score > 0 for score in scores)


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 2.5]), min_size=1, max_size=1500),
    peaks=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.5, 50, width=32)), max_size=5),
    k=st.integers(1, 2000),
    block=st.sampled_from([1, 8, 100, 2048]),
)
def test_the_best_rows_are_those_that_sorting_would_give(
    scores: list[float], peaks: list[tuple[int, float]], k: int, block: int
) -> None:
    array = np.array(scores, dtype=np.float32)
    for place, height in peaks:
        array[place % len(array)] = height
    expected = sorted(np.flatnonzero(array).tolist(), key=lambda row: (-array[row], row))[:k]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "_BLOCK", block)
        assert best_rows(array, k).tolist() == expected


def test_threads_search_at_the_same_time(drawn: Corpus) -> None:
    retriever = BM25Retriever(drawn)
    queries = [f"w{n} w{n + 1} Title {n}" for n in range(64)]
    expected = BM25Retriever(drawn).search(queries, 5)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.setdefault(n, retriever.search(queries[n : n + 8], 5)))
        for n in range(0, 64, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [document for n in range(0, 64, 8) for document in found[n]] == expected


def search_in_process(path: str, answers: multiprocessing.SimpleQueue[Any]) -> None:
    retriever = BM25Retriever(open_corpus(path))
    answers.put(retriever.search(["w1 w2", "Title 3"], 4))


def test_processes_share_one_index(drawn: Corpus) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=search_in_process, args=(str(drawn.path), answers))
    process.start()
    process.join(60)
    assert answers.get() == BM25Retriever(drawn).search(["w1 w2", "Title 3"], 4)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_the_index_is_mapped_not_copied(drawn: Corpus, tmp_path: Path) -> None:
    retriever = BM25Retriever(drawn, index_path=str(tmp_path / "index"))
    retriever.search(["w1 w2"], 3)
    mapped = Path("/proc/self/maps").read_text()
    names = {path.name for path in (tmp_path / "index").iterdir()}
    for name in (
        "data.csc.index.npy",
        "indices.csc.index.npy",
        "indptr.csc.index.npy",
        "vocabulary.bin",
        "vocabulary.npy",
    ):
        assert name in names
        lines = [line for line in mapped.splitlines() if line.endswith(f"{tmp_path}/index/{name}")]
        assert lines, name
        assert all("w" not in line.split()[1] for line in lines)


def memory_in_process(path: str, index: str, answers: multiprocessing.SimpleQueue[Any]) -> None:
    retriever = BM25Retriever(open_corpus(path), index_path=index)
    retriever.search(EVERY_WORD, 3)
    sizes: Counter[str] = Counter()
    of_index = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if ":" not in name:
            of_index = index in rest
        elif of_index and name.startswith(("Private_", "Shared_", "Anonymous")):
            sizes[name.partition("_")[0].rstrip(":")] += int(rest.split()[0])
    answers.put(dict(sizes))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_two_processes_have_the_index_in_memory_once(drawn: Corpus, tmp_path: Path) -> None:
    retriever = BM25Retriever(drawn, index_path=str(tmp_path / "index"))
    retriever.search(EVERY_WORD, 3)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    arguments = (str(drawn.path), str(tmp_path / "index"), answers)
    process = context.Process(target=memory_in_process, args=arguments)
    process.start()
    process.join(60)
    kilobytes = answers.get()
    assert kilobytes["Anonymous"] == 0
    assert kilobytes["Private"] == 0
    assert kilobytes["Shared"] > 0
    retriever.close()


def test_a_forked_process_searches_on(drawn: Corpus) -> None:
    retriever = BM25Retriever(drawn)
    expected = retriever.search(["running"], 3)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(retriever.search(["running"], 3) == expected).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "true"
    os.waitpid(child, 0)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_wrong_settings_are_named(drawn: Corpus) -> None:
    for field, value in (("k1", -1.0), ("k1", math.nan), ("b", 1.5)):
        with pytest.raises(UserError, match=f"search: retriever: {field} is "):
            open_retriever({"kind": "bm25s", field: value}, lambda: drawn)
    with pytest.raises(UserError, match="did you mean 'stemmer'"):
        check_retriever({"kind": "bm25s", "stemer": "porter"})
    with pytest.raises(UserError, match="stop_words"):
        check_retriever({"kind": "bm25s", "stop_words": "english"})


def test_an_index_of_another_corpus_or_setting_is_refused(drawn: Corpus, tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    BM25Retriever(drawn, index_path=path)
    with pytest.raises(UserError, match=r"built with stemmer \"porter\", not \"none\""):
        BM25Retriever(drawn, index_path=path, stemmer="none")
    with pytest.raises(UserError, match="another corpus"):
        BM25Retriever(corpus_of(tmp_path / "other.jsonl", ["other words"]), index_path=path)


@pytest.mark.parametrize("name", ["bm25s", "Stemmer", "regex"])
def test_a_library_that_is_missing_is_named(drawn: Corpus, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"needs the package '{name}': pip install 'stepgym\[search\]'$"):
        BM25Retriever(drawn)


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(
    drawn: Corpus, tmp_path: Path, files_end_at: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "index"
    with files_end_at(2000), pytest.raises(UserError, match=r"cannot write .*index: .*make room"):
        BM25Retriever(drawn, index_path=str(path))
    assert [left.name for left in tmp_path.iterdir()] == [".index.lock"]
    assert BM25Retriever(drawn, index_path=str(path)).search(["Title"], 1) != [[]]


def test_a_corpus_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no passage of .*none\.jsonl has a word to search for"):
        BM25Retriever(corpus_of(tmp_path / "none.jsonl", ["the", "?!", ""]))
    assert list(tmp_path.glob("*.building")) == []


def test_one_passage_is_a_corpus(tmp_path: Path) -> None:
    retriever = BM25Retriever(corpus_of(tmp_path / "one.jsonl", ["Velor\nA poet."]))
    ((only,),) = retriever.search(["poets"], 3)
    assert only.title == "Velor"
    assert only.score > 0


@pytest.mark.parametrize(
    "name", ["data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "vocabulary.bin"]
)
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_index_is_refused_at_opening(drawn: Corpus, tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / "index"
    BM25Retriever(drawn, index_path=str(path))
    whole = (path / name).read_bytes()
    if damage == "cut":
        (path / name).write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x10]))
    else:
        (path / name).unlink()
    with pytest.raises(UserError, match=f"{name} is (damaged|missing)"):
        BM25Retriever(drawn, index_path=str(path))


def test_a_large_file_is_not_read_whole_and_what_is_read_of_it_is_checked(
    drawn: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_folder, "CHECKED_WHOLE", 0)
    monkeypatch.setattr(index_folder, "_BLOCK", 1)
    monkeypatch.setattr(index_folder, "_BLOCKS", 2)
    path = tmp_path / "index"
    BM25Retriever(drawn, index_path=str(path))

    def spoil(name: str, value: float, place: slice) -> None:
        array = np.load(path / name)
        whole = array.copy()
        array[place] = value
        ends = (path / name).read_bytes()[-1:]
        np.save(path / name, array)
        with (path / name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(ends)
        spoiled.append((name, whole))

    def repair() -> None:
        for name, whole in spoiled:
            np.save(path / name, whole)
        spoiled.clear()

    spoiled: list[tuple[str, Any]] = []
    for name, value in (
        ("indices.csc.index.npy", 10**6),
        ("indices.csc.index.npy", -1),
        ("data.csc.index.npy", math.nan),
        ("data.csc.index.npy", -5.0),
    ):
        spoil(name, value, slice(0, -1))
        retriever = BM25Retriever(drawn, index_path=str(path))
        with pytest.raises(RetrieverError, match="is damaged; remove it and it is built again"):
            retriever.search(["Title w1"], 3)
        repair()
    spoil("indptr.csc.index.npy", 3, slice(5, 6))
    with pytest.raises(UserError, match="is damaged; remove it"):
        BM25Retriever(drawn, index_path=str(path))


def test_a_changed_corpus_is_no_wrong_passage(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "c.jsonl", ["Velor\nA poet.", "Narn\nA town."])
    retriever = BM25Retriever(corpus)
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "x"}\n')
    with pytest.raises(RetrieverError, match="was changed while it was open"):
        retriever.search(["poet"], 1)


def test_closed_means_closed(drawn: Corpus) -> None:
    retriever = BM25Retriever(drawn)
    retriever.close()
    retriever.close()
    with pytest.raises(RetrieverError, match="is closed"):
        retriever.search(["w1"], 1)


def test_building_and_searching_say_nothing_for_debugging(drawn: Corpus, tmp_path: Path) -> None:
    script = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s'); "
        "from stepgym_search.corpus import open_corpus; from stepgym_search.retrievers.bm25 import BM25Retriever; "
        "BM25Retriever(open_corpus(sys.argv[1]), index_path=sys.argv[2]).search(['w1', ''], 3)"
    )
    command = [sys.executable, "-c", script, str(drawn.path), str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert {line.split()[0] for line in done.stderr.splitlines()} == {"stepgym_search.retrievers.index_folder"}
