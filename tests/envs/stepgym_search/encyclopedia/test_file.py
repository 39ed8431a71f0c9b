from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest
from stepgym_search.encyclopedia import EncyclopediaConfig, articles, encyclopedia_file, file

from stepgym.errors import UserError

SMALL = EncyclopediaConfig(articles=200)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path))
    return tmp_path


def test_the_file_holds_one_article_in_each_line(own_home: Path) -> None:
    path = encyclopedia_file(SMALL)
    assert path == own_home / "search" / "encyclopedias" / SMALL.digest / "corpus.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().decode().splitlines()]
    assert rows == [{"id": a.id, "contents": a.contents} for a in articles(SMALL)]
    assert path.read_bytes().endswith(b"}\n")
    assert path.stat().st_mode & 0o777 == 0o644  # others may read a home that is shared


@pytest.mark.parametrize(
    ("config", "digest"),
    [
        (SMALL, "610fb6dff74dbefb"),
        (EncyclopediaConfig(seed=7, articles=400, distractors=3, sentences=6), "44f8f7218c8f3738"),
        (EncyclopediaConfig(articles=200, wording="plain", names="short", distractors=2), "24d75353b8410345"),
    ],
    ids=["usual", "long", "short"],
)
def test_the_same_bytes_come_out_on_every_machine(config: EncyclopediaConfig, digest: str) -> None:
    # Whoever changes the texts on purpose raises `_VERSION` in config.py and puts the new digests here.
    assert hashlib.sha256(encyclopedia_file(config).read_bytes()).hexdigest()[:16] == digest


def test_it_is_written_once_whatever_is_asked() -> None:
    path = encyclopedia_file(SMALL)
    before = path.stat()
    assert encyclopedia_file(EncyclopediaConfig(articles=200, kinds=("date",))) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_settings_beside_it_say_what_it_is() -> None:
    path = encyclopedia_file(SMALL)
    noted = json.loads(path.with_name("settings.json").read_text())
    assert noted.pop("bytes") == path.stat().st_size
    assert noted == SMALL.text_settings()


def test_one_that_was_cut_is_written_again() -> None:
    path = encyclopedia_file(SMALL)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert encyclopedia_file(SMALL) == path
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bytes": "all"}'])
def test_one_without_readable_settings_is_written_again(text: str) -> None:
    path = encyclopedia_file(SMALL)
    inode = path.stat().st_ino
    path.with_name("settings.json").write_text(text)
    encyclopedia_file(SMALL)
    assert path.stat().st_ino != inode


def test_nothing_is_left_of_one_that_was_interrupted(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    def stop(config: EncyclopediaConfig) -> object:
        yield next(articles(config))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(file, "articles", stop)
        with pytest.raises(KeyboardInterrupt):
            encyclopedia_file(SMALL)
    assert [path for path in own_home.rglob("*") if path.is_file()] == []
    assert len(encyclopedia_file(SMALL).read_text().splitlines()) == 200


def test_several_processes_may_write_it_at_once() -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(encyclopedia_file, [SMALL] * 3)
    assert len(set(paths)) == 1
    assert len(paths[0].read_text().splitlines()) == 200
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["corpus.jsonl", "settings.json"]


def test_a_home_that_cannot_be_written_is_a_users_error(own_home: Path) -> None:
    (own_home / "search").write_text("a file where a folder should be")
    with pytest.raises(
        UserError, match=r"^search: the encyclopedia .*corpus\.jsonl cannot be written: Not a directory$"
    ):
        encyclopedia_file(SMALL)


def test_a_million_articles_need_no_waiting_before_the_first() -> None:
    assert next(articles(EncyclopediaConfig(articles=1_000_000))) == next(articles(SMALL))
