from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from stepgym_search import corpus as corpus_module
from stepgym_search import progress
from stepgym_search.corpus import open_corpus
from stepgym_search.progress import LongWork
from stepgym_search.retrievers import bm25, lucene
from stepgym_search.retrievers.bm25 import BM25Retriever
from stepgym_search.retrievers.lucene import LuceneRetriever

from stepgym.cli.main import run


def test_work_that_is_quick_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    work = LongWork("counting", 3, "sheep")
    for done in range(4):
        work.at(done)
    work.then("sleeping")
    assert caplog.messages == []


def test_long_work_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    work = LongWork("counting", 20_000, "sheep")
    for second in range(40):
        now = 100.0 + second
        work.at(1000 + second)
    work.then("sleeping")
    assert caplog.messages == [
        "counting: 1,005 of 20,000 sheep",
        "counting: 1,020 of 20,000 sheep",
        "counting: 1,035 of 20,000 sheep",
        "sleeping",
    ]


def test_reading_and_indexing_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "NEXT_SECONDS", 0.0)
    for module, name in ((corpus_module, "_TOLD_LINES"), (bm25, "_TOLD_PASSAGES"), (lucene, "_BATCH")):
        monkeypatch.setattr(module, name, 2)
    caplog.set_level(logging.INFO, "stepgym.progress")
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": n, "contents": f"word{n}"}) + "\n" for n in range(5)))
    corpus = open_corpus(path)
    assert caplog.messages == [f"reading {path} for the first time: 0.0 of 0.0 GB"] * 2
    caplog.clear()
    BM25Retriever(corpus, index_path=str(tmp_path / "ours"))
    told = [record.getMessage() for record in caplog.records if record.name == "stepgym.progress"]
    words = f"finding the words of {path}"
    assert told == [f"{words}: 2 of 5 passages", f"{words}: 4 of 5 passages", "scoring the 5 words of 5 passages"]
    caplog.clear()
    LuceneRetriever(corpus, index_path=str(tmp_path / "lucenes")).close()
    told = [record.getMessage() for record in caplog.records if record.name == "stepgym.progress"]
    assert told == [f"indexing {path}: {done} of 5 passages" for done in (2, 4, 5)]


def test_the_command_line_shows_it() -> None:
    assert run(["--version"]) == 0
    assert progress.logger.isEnabledFor(logging.INFO)
    assert not logging.getLogger("stepgym").isEnabledFor(logging.INFO)
