from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search import corpus as corpus_module
from stepgym_search.corpus import Corpus, open_corpus

from stepgym.errors import EnvError, UserError
from stepgym.home import home


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


@pytest.fixture
def three(tmp_path: Path) -> Path:
    rows = ({"id": str(n), "contents": f'"Title {n}"\nText {n}.\nMore.', "other": [n]} for n in range(3))
    return write(tmp_path / "three.jsonl", *rows)


def test_rows_come_in_the_order_of_the_lines(three: Path) -> None:
    corpus = open_corpus(three)
    assert len(corpus) == 3
    assert [document.id for document in corpus] == ["0", "1", "2"]
    assert corpus[1].title == '"Title 1"'
    assert corpus[1].text == "Text 1.\nMore."
    assert corpus[-1] == corpus[2]
    assert [document.id for document in corpus[1:]] == ["1", "2"]
    assert corpus.path == three
    assert corpus.digest == hashlib.sha256(three.read_bytes()).hexdigest()
    for row in (3, -4):
        with pytest.raises(IndexError, match="3 passages"):
            corpus[row]


def test_a_second_opening_takes_what_the_first_found(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_corpus(three)

    def scan(self: Corpus, folder: Path) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(Corpus, "_scan", scan)
    assert open_corpus(three).digest == first.digest


@pytest.mark.parametrize("damage", ["offsets", "offsets missing", "description", "description form"])
def test_damaged_notes_of_an_earlier_opening_are_made_anew(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path / "home"))
    before = open_corpus(three).digest
    (folder,) = (path for path in home("search", "corpora").iterdir() if path.is_dir())
    if damage == "offsets":
        offsets = np.load(folder / "offsets.npy")
        offsets[1] += 1
        np.save(folder / "offsets.npy", offsets)
    elif damage == "offsets missing":
        (folder / "offsets.npy").unlink()
    elif damage == "description":
        (folder / "corpus.json").write_text("{")
    else:
        (folder / "corpus.json").write_text("[]")
    again = open_corpus(three)
    assert again.digest == before
    assert [document.title for document in again] == ['"Title 0"', '"Title 1"', '"Title 2"']


def test_a_corpus_that_was_changed_is_another_one(three: Path) -> None:
    before = open_corpus(three)
    digest = before.digest
    write(three, {"id": "0", "contents": "New\nText"})
    with pytest.raises(EnvError, match=r"three\.jsonl was changed while it was open"):
        before[0]
    after = open_corpus(three)
    assert (len(after), after.digest == digest) == (1, False)


def test_a_change_of_the_same_length_is_seen_by_its_time(three: Path) -> None:
    before = open_corpus(three)
    changed = three.read_bytes().replace(b"Text 1.", b"Tort 1.")
    three.write_bytes(changed)
    os.utime(three, ns=(1, 1))
    with pytest.raises(EnvError, match="was changed"):
        before[1]
    assert open_corpus(three)[1].text == "Tort 1.\nMore."


def test_lines_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b'{"id": 7, "contents": "A"}\r\n\r\n  \n'
        + '{"contents": "東京\\n😀 \\ud83d\\ude00 \\ud800"}\n'.encode()
        + b'{"id": "x", "contents": ""}'
    )
    corpus = open_corpus(path)
    assert [(document.id, document.contents) for document in corpus] == [
        ("7", "A"),
        ("1", "東京\n😀 😀 \ufffd"),
        ("x", ""),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"no json", r"line 2 of .*bad\.jsonl: not JSON \(Expecting value at character 0\)"),
        (b'["a"]', 'line 2 .*not a JSON object with a text "contents"'),
        (b'{"id": "a"}', 'line 2 .*not a JSON object with a text "contents"'),
        (b'{"contents": 3}', 'line 2 .*not a JSON object with a text "contents"'),
        (b'{"contents": "a", "id": [1]}', r'line 2 .*"id" is \[1\]'),
        (b'{"contents": "a", "id": true}', '"id" is true'),
        (b'{"contents": "\xff"}', "line 2 .*not UTF-8"),
        (b"[" * 100_000, "line 2 .*too deeply nested"),
        (b'{"contents": "a", "id": ' + b"9" * 5000 + b"}", "line 2 "),
    ],
)
def test_a_wrong_line_is_named_in_one_line(tmp_path: Path, row: bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"id": "0", "contents": "fine"}, row, {"id": "2", "contents": "fine"})
    with pytest.raises(UserError, match=message) as raised:
        open_corpus(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_corpus_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"there is no corpus at .*none.jsonl"):
        open_corpus(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        open_corpus(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")  # nobody ever writes to it
    with pytest.raises(UserError, match=r"pipe\.jsonl is no file that can be read twice, but a pipe"):
        open_corpus(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"cannot read the corpus .*xxx: File name too long"):
        open_corpus(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match=r"is no path of a corpus: embedded null byte"):
        open_corpus("corpus\0.jsonl")
    with pytest.raises(UserError, match=r"wiki-18\.jsonl\.gz is compressed: unpack it first"):
        open_corpus(tmp_path / "wiki-18.jsonl.gz")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(UserError, match="holds no passage"):
        open_corpus(empty)
    monkeypatch.setattr(corpus_module, "LONGEST_LINE", 1000)
    array = tmp_path / "array.json"
    array.write_text("[" + '{"contents": "a"}, ' * 100 + "]")
    with pytest.raises(UserError, match=r"line 1 of .*longer than"):
        open_corpus(array)


def test_a_home_that_cannot_be_written_to_is_one_line(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*STEPGYM_HOME"):
        open_corpus(three)


def test_a_closed_corpus_says_so(three: Path) -> None:
    corpus = open_corpus(three)
    corpus.close()
    corpus.close()
    with pytest.raises(EnvError, match=r"cannot read .*three\.jsonl"):
        corpus[0]


def test_a_corpus_goes_to_another_process_by_its_path(three: Path) -> None:
    copy = pickle.loads(pickle.dumps(open_corpus(three)))
    assert [document.id for document in copy] == ["0", "1", "2"]


def test_many_threads_open_and_read_one_corpus(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *({"id": str(n), "contents": f"T{n}\n" + "x" * n} for n in range(300)))
    wrong: list[str] = []

    def read(start: int) -> None:
        corpus = open_corpus(path)
        for row in [*range(start, 300), *range(start)]:
            if corpus[row].contents != f"T{row}\n" + "x" * row:
                wrong.append(f"{start}: {row}")

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, 300, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=8),
    ascii_only=st.booleans(),
    blank=st.booleans(),
)
def test_any_text_comes_back(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], ascii_only: bool, blank: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    between = "\n\n" if blank else "\n"
    lines = [json.dumps({"id": n, "contents": text}, ensure_ascii=ascii_only) for n, text in enumerate(contents)]
    path.write_text(between.join(lines), encoding="utf-8")
    corpus = open_corpus(path)
    assert [document.contents for document in corpus] == contents
    assert corpus.digest == hashlib.sha256(path.read_bytes()).hexdigest()
