from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from stepgym_search.corpus import Corpus, open_corpus
from stepgym_search.document import Document
from stepgym_search.retrievers import lucene, open_retriever
from stepgym_search.retrievers.base import Retriever, RetrieverError
from stepgym_search.retrievers.java import java
from stepgym_search.retrievers.lucene import LuceneRetriever

from stepgym.errors import UserError

CONTENTS = [
    '"Velor"\nVelor was a poet. He was born in Narn and died in Ost.',
    '"Narn"\nNarn is a town of fishermen. Its café has 12 tables.',
    '"Ost"\nOst is a harbour. Its mayor is Tarka.',
    '"京都"\n京都 は 日本 の 都市 です。 😀 عربي',
    "",
    '"Twins"\nThe same poem.',
    '"Twins"\nThe same poem.',
]


def corpus_of(path: Path, contents: list[str]) -> Corpus:
    path.write_text("".join(json.dumps({"id": f"d{n}", "contents": text}) + "\n" for n, text in enumerate(contents)))
    return open_corpus(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("corpus") / "towns.jsonl", CONTENTS)


@pytest.fixture(scope="module")
def retriever(corpus: Corpus) -> LuceneRetriever:
    return LuceneRetriever(corpus)


def names(found: list[Document]) -> list[str]:
    return [document.id for document in found]


def make_index(folder: Path, documents: list[dict[str, str]], *options: str) -> Path:
    """A Lucene index as anybody makes one with pyserini."""

    def make() -> None:
        from pyserini.index.lucene import LuceneIndexer

        indexer = LuceneIndexer(str(folder), args=["-index", str(folder), *options], threads=1)
        indexer.add_batch_raw([json.dumps(document) for document in documents])
        indexer.close()

    java.call(make, "making an index")
    return folder


def test_passages_come_from_the_corpus_best_first(retriever: LuceneRetriever, corpus: Corpus) -> None:
    first, second, third = retriever.search(["poets", "the town of Narn", "tarka"], 3)
    assert names(first) == ["d0"]
    assert names(second) == ["d1", "d0"]
    assert names(third) == ["d2"]
    assert second[0].contents == corpus[1].contents
    assert second[0].score > second[1].score > 0
    assert isinstance(retriever, Retriever)


def test_one_query_at_a_time_finds_the_same(retriever: LuceneRetriever) -> None:
    queries = ["poets", "", "Narn", "nothing", "mayor " * 600, "Narn Ost"]
    assert retriever.search(queries, 2) == [retriever.search([query], 2)[0] for query in queries]


def test_passages_of_equal_score_come_in_the_order_of_the_corpus(retriever: LuceneRetriever, tmp_path: Path) -> None:
    (twins,) = retriever.search(["twins poem"], 5)
    assert names(twins) == ["d5", "d6"]
    same = LuceneRetriever(corpus_of(tmp_path / "same.jsonl", ["The same poem."] * 120))
    assert names(same.search(["poem"], 120)[0]) == [f"d{row}" for row in range(120)]
    same.close()


def test_the_index_lies_ready(retriever: LuceneRetriever, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LuceneRetriever, "_build", lambda self, folder: pytest.fail("built twice"))
    again = LuceneRetriever(corpus, k1=2.0, b=1.0)  # which the index does not depend on
    ((mine, *_),), ((other, *_),) = again.search(["Narn"], 3), retriever.search(["Narn"], 3)
    assert mine.id == other.id
    assert mine.score != other.score
    again.close()


@pytest.mark.parametrize(
    "query",
    [
        "",
        " \n",
        "the of",
        "?!",
        "\x00",
        "\ud83d",
        "AND",
        "(",
        '"',
        "a:b*~ [x TO",
        "\\",
        "漢",
        "кириллица",
        "x" * 100_000,
    ],
)
def test_a_query_without_a_known_word_finds_nothing(retriever: LuceneRetriever, query: str) -> None:
    assert retriever.search([query], 3) == [[]]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ('+Narn -fishermen contents:(AND "', "d1"),
        ("NOT poet*~2 /x/ [a TO b]", "d0"),
        ("京都", "d3"),
        ("😀", "d3"),
        ("عربي", "d3"),
        ("\x00tarka\ud800", "d2"),
        ("CAFÉ", "d1"),
    ],
)
def test_syntax_and_scripts_are_words(retriever: LuceneRetriever, query: str, found: str) -> None:
    assert names(retriever.search([query], 1)[0]) == [found]


def test_very_long_queries(retriever: LuceneRetriever) -> None:
    unknown = " ".join(f"z{n}" for n in range(1023))
    repeated, late, too_late = retriever.search(["tarka " * 20_000, f"{unknown} tarka", f"{unknown} z tarka"], 3)
    assert names(repeated) == names(late) == ["d2"]
    assert math.isfinite(repeated[0].score)
    assert repeated[0].score == pytest.approx(20_000 * late[0].score, rel=1e-3)
    assert too_late == []


def test_k_beyond_the_corpus_and_none_at_all(retriever: LuceneRetriever) -> None:
    (found,) = retriever.search(["narn ost"], 10**9)
    assert sorted(names(found)) == ["d0", "d1", "d2"]
    assert retriever.search(["narn"], 0) == [[]]
    assert retriever.search([], 3) == []


def test_threads_may_search_at_once(retriever: LuceneRetriever) -> None:
    queries = ["Narn", "poem"]
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: found.setdefault(n, retriever.search(queries, 2))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [retriever.search(queries, 2)] * 8


# ---- indexes of other people ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-storeRaw", "-storeContents"])
def test_an_index_that_stores_its_passages_needs_no_corpus(tmp_path: Path, option: str) -> None:
    documents = [{"id": f"wiki-{n}", "contents": text} for n, text in enumerate(CONTENTS) if text]
    folder = make_index(tmp_path / "theirs", documents, option)

    def corpus() -> Corpus:
        raise AssertionError("the corpus was opened")

    retriever = open_retriever({"kind": "pyserini", "index_path": str(folder)}, corpus)
    ((document, *_),) = retriever.search(["poet 京都"], 3)
    assert (document.id, document.contents) == ("wiki-3", CONTENTS[3])
    assert not (folder / "manifest.json").exists()
    retriever.close()


def test_an_index_without_passages_has_rows_for_ids(tmp_path: Path, corpus: Corpus) -> None:
    documents = [{"id": str(n), "contents": text} for n, text in enumerate(CONTENTS) if text]
    folder = make_index(tmp_path / "theirs", documents)
    retriever = open_retriever({"kind": "pyserini", "index_path": str(folder)}, lambda: corpus)
    assert names(retriever.search(["tarka"], 3)[0]) == ["d2"]
    with pytest.raises(UserError, match="theirs stores no passages: name the corpus"):
        LuceneRetriever(None, index_path=str(folder))
    named = make_index(tmp_path / "named", [{"id": "Ost", "contents": "tarka"}, {"id": "99", "contents": "poet"}])
    lost = LuceneRetriever(corpus, index_path=str(named))
    for query, name in (("tarka", "'Ost'"), ("poet", "'99'")):
        with pytest.raises(RetrieverError, match=f"its id {name} is no row of the corpus"):
            lost.search([query], 3)


def test_a_prebuilt_index_is_known_by_name_and_needs_a_network(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="unknown prebuilt index 'wikipedia-dpr-10w'; did you mean 'wikipedia-dpr-100w"):
        LuceneRetriever(None, prebuilt="wikipedia-dpr-10w")
    with pytest.raises(UserError, match="'prebuilt' and 'index_path' are both given"):
        LuceneRetriever(None, prebuilt="msmarco-v1-passage", index_path="x")
    # Where pyserini looks for it, a download that ends in nothing: nobody listens at this port.
    import pyserini.prebuilt_index_info as known

    monkeypatch.setenv("PYSERINI_CACHE", str(tmp_path / "cache"))
    entry = {**known.TF_INDEX_INFO["cacm"], "urls": ["http://127.0.0.1:9/cacm.tar.gz"]}
    monkeypatch.setitem(known.TF_INDEX_INFO, "cacm", entry)
    with pytest.raises(UserError, match=r"the index cacm cannot be downloaded: .* name one that is there"):
        open_retriever({"kind": "pyserini", "prebuilt": "cacm"}, lambda: pytest.fail("the corpus was opened"))
    assert capfd.readouterr().out == ""


def test_a_prebuilt_index_that_was_downloaded_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyserini.prebuilt_index_info as known

    monkeypatch.setenv("PYSERINI_CACHE", str(tmp_path))
    entry = known.TF_INDEX_INFO["cacm"]
    name = entry["filename"].removesuffix(".tar.gz")
    make_index(tmp_path / "indexes" / f"{name}.{entry['md5']}", [{"id": "CACM-1", "contents": "tarka"}], "-storeRaw")
    retriever = LuceneRetriever(None, prebuilt="cacm")
    assert retriever.search(["tarka"], 1)[0][0].contents == "tarka"


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_an_index_that_is_damaged_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "index"
    LuceneRetriever(corpus, index_path=str(path)).close()
    for file in sorted(path.glob("_*")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(UserError, match=f"{file.name} is damaged .*remove .*index"):
            LuceneRetriever(corpus, index_path=str(path))
        file.unlink()
        with pytest.raises(UserError, match=f"{file.name} is missing"):
            LuceneRetriever(corpus, index_path=str(path))
        file.write_bytes(whole)
    LuceneRetriever(corpus, index_path=str(path)).close()


def test_a_foreign_index_that_is_damaged_is_one_line(tmp_path: Path, corpus: Corpus) -> None:
    folder = make_index(tmp_path / "theirs", [{"id": str(n), "contents": "tarka"} for n in range(50)], "-storeRaw")
    shutil.copytree(folder, tmp_path / "cut")
    for file in (tmp_path / "cut").glob("*.doc"):
        file.write_bytes(file.read_bytes()[:10])
    shutil.copytree(folder, tmp_path / "headless")
    for file in (tmp_path / "headless").glob("segments_*"):
        file.write_bytes(b"nothing")
    for name in ("cut", "headless"):
        for attempt in (
            lambda name=name: LuceneRetriever(corpus, index_path=str(tmp_path / name)),
            lambda name=name: LuceneRetriever.has_passages({"index_path": str(tmp_path / name)}),
        ):
            with pytest.raises(UserError, match=f"opening the index .*{name}: Java says .*it is damaged") as raised:
                attempt()
            assert "\n" not in str(raised.value)


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(
    corpus: Corpus, tmp_path: Path, files_end_at: Callable[[int], AbstractContextManager[None]]
) -> None:
    java.call(lambda: None, "starting")
    with (
        files_end_at(200),
        pytest.raises(UserError, match=r"building the index .*Java says .*; is there room on the disk"),
    ):
        LuceneRetriever(corpus, index_path=str(tmp_path / "index"))
    assert [left.name for left in tmp_path.iterdir()] == [".index.lock"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_an_interrupted_build_leaves_nothing_and_java_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of(tmp_path / "c.jsonl", CONTENTS)

    def stop(self: Corpus) -> Iterator[Document]:
        yield from (corpus[0], corpus[1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "__iter__", stop)
        patch.setattr(lucene, "_BATCH", 1)
        with pytest.raises(KeyboardInterrupt):
            LuceneRetriever(corpus, index_path=str(tmp_path / "index"))
    # While Java is still asked to begin, too.
    java.later(lambda: time.sleep(0.6))
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        LuceneRetriever(corpus, index_path=str(tmp_path / "index"))
    java.call(lambda: None, "waiting")
    assert sorted(left.name for left in tmp_path.iterdir()) == [".index.lock", "c.jsonl"]
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert [file for file in files if "building" in file] == []


def test_a_forked_process_closes_without_a_word_and_opens_none(corpus: Corpus, retriever: LuceneRetriever) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "close: "
        try:
            retriever.close()
            answer = ""
            LuceneRetriever(corpus)
        except Exception as error:
            answer += f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    assert answer.startswith("RetrieverError: search: Java was started before this process was forked")
    assert "damaged" not in answer
    assert names(retriever.search(["poet"], 1)[0]) == ["d0"]


def test_another_corpus_no_corpus_and_no_index(corpus: Corpus, tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    LuceneRetriever(corpus, index_path=path).close()
    with pytest.raises(UserError, match="another corpus"):
        LuceneRetriever(corpus_of(tmp_path / "other.jsonl", ["other"]), index_path=path)
    with pytest.raises(UserError, match="there is no corpus, and no index that has passages"):
        LuceneRetriever(None)
    with pytest.raises(UserError, match=r"no passage of .* has a word to search for"):
        LuceneRetriever(corpus_of(tmp_path / "none.jsonl", ["", " "]))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").touch()
    with pytest.raises(UserError, match="is no index of stepgym's"):
        LuceneRetriever(corpus, index_path=str(tmp_path / "thesis"))
    with pytest.raises(UserError, match="b is 2"):
        LuceneRetriever(corpus, b=2.0)


def test_a_changed_corpus_is_no_wrong_passage(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "c.jsonl", CONTENTS)
    retriever = LuceneRetriever(corpus)
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "x"}\n')
    with pytest.raises(RetrieverError, match="was changed while it was open"):
        retriever.search(["poet"], 1)


def test_closed_means_closed(corpus: Corpus) -> None:
    retriever = LuceneRetriever(corpus)
    retriever.close()
    retriever.close()
    with pytest.raises(RetrieverError, match="is closed"):
        retriever.search(["poet"], 1)


def test_one_that_nobody_closes_is_let_go(corpus: Corpus) -> None:
    retriever = LuceneRetriever(corpus)
    number, gone = retriever._number, weakref.ref(retriever)
    assert number in lucene._searchers
    del retriever
    assert gone() is None
    java.call(lambda: None, "waiting")  # calls are done in order
    assert number not in lucene._searchers


def test_it_needs_no_torch_and_prints_nothing(corpus: Corpus) -> None:
    script = (
        "import sys; from stepgym_search.corpus import open_corpus; "
        "from stepgym_search.retrievers.lucene import LuceneRetriever; "
        "assert 'jnius' not in sys.modules; "
        "retriever = LuceneRetriever(open_corpus(sys.argv[1]), index_path=sys.argv[2]); "
        "assert retriever.search(['tarka'], 1)[0][0].id == 'd2'; "
        "assert not {'torch', 'transformers', 'faiss'} & set(sys.modules), 'heavy'"
    )
    path = str(corpus.path.with_name("quiet"))
    done = subprocess.run(
        [sys.executable, "-c", script, str(corpus.path), path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
