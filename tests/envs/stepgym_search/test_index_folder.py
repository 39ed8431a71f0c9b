from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from stepgym_search.corpus import Corpus, open_corpus
from stepgym_search.retrievers import index_folder
from stepgym_search.retrievers.index_folder import IndexManifest, open_index_folder

from stepgym.errors import UserError
from stepgym.home import home


@pytest.fixture
def corpus(passages: Path) -> Corpus:
    return open_corpus(passages)


def build(folder: Path) -> None:
    (folder / "big.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "deep").mkdir()
    (folder / "deep" / "small.txt").write_text("words")


def opened(corpus: Corpus, path: Path | None, **changes: Any) -> Path:
    arguments: dict[str, Any] = {"kind": "test", "settings": {"form": 1, "k1": 0.9}, "build": build, **changes}
    return open_index_folder(corpus, index_path=path, **arguments)


def test_it_is_built_once_and_then_found(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert opened(corpus, path) == path
    assert opened(corpus, path, build=lambda folder: pytest.fail("built twice")) == path
    manifest = IndexManifest.read(path)
    assert (manifest.kind, manifest.corpus, manifest.rows) == ("test", corpus.digest, len(corpus))
    assert manifest.settings == {"form": 1, "k1": 0.9}
    assert {name: entry["bytes"] for name, entry in manifest.files.items()} == {"big.bin": 10240, "deep/small.txt": 5}
    assert json.loads((path / "manifest.json").read_text()) == manifest.to_dict()


def test_without_a_path_each_corpus_and_setting_has_its_own_folder(corpus: Corpus, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "0", "contents": "a"}\n')
    folders = [
        opened(corpus, None),
        opened(corpus, None, settings={"form": 1, "k1": 1.2}),
        opened(corpus, None, kind="second"),
        opened(open_corpus(other), None),
    ]
    assert len(set(folders)) == 4
    assert all(folder.parent == home("search", "indexes") for folder in folders)
    assert opened(corpus, None) == folders[0]


def test_another_corpus_other_settings_another_kind(corpus: Corpus, tmp_path: Path) -> None:
    path = opened(corpus, tmp_path / "index")
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "0", "contents": "a"}\n')
    with pytest.raises(UserError, match=r"index is an index of another corpus than .*other\.jsonl.* remove "):
        opened(open_corpus(other), path)
    same_size = tmp_path / "same size.jsonl"
    same_size.write_text('{"contents": "a"}\n' * len(corpus))
    with pytest.raises(UserError, match=r"index is an index of another corpus than .*same size\.jsonl"):
        opened(open_corpus(same_size), path)
    with pytest.raises(UserError, match=r"was built with k1 0\.9, not 1\.2: remove .* or name another index_path"):
        opened(corpus, path, settings={"form": 1, "k1": 1.2})
    with pytest.raises(UserError, match=r"was built with b null, not 0\.4"):
        opened(corpus, path, settings={"form": 1, "k1": 0.9, "b": 0.4})
    with pytest.raises(UserError, match="of the retriever test, not dense"):
        opened(corpus, path, kind="dense")


def truncate(path: Path) -> None:
    (path / "big.bin").write_bytes((path / "big.bin").read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray((path / "big.bin").read_bytes())
    data[5000] ^= 1
    (path / "big.bin").write_bytes(data)


def remove(path: Path) -> None:
    (path / "deep" / "small.txt").unlink()


def spoil(path: Path) -> None:
    (path / "manifest.json").write_text('{"version": 1, "kind": ')


def empty_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"version": 1}')


def no_files(path: Path) -> None:
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**fields, "files": {"big.bin": 3}}))


def nameless_settings(path: Path) -> None:
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**fields, "settings": 3}))


def other_version(path: Path) -> None:
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**fields, "version": 9, "new": 1}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"big\.bin is damaged \(10239 bytes, not 10240\)"),
        (flip, r"big\.bin is damaged \(its checksum is another\)"),
        (remove, r"small\.txt is missing"),
        (spoil, r"manifest\.json is damaged"),
        (empty_manifest, r"manifest\.json is damaged"),
        (no_files, r"manifest\.json is damaged"),
        (nameless_settings, r"manifest\.json is damaged"),
        (other_version, r"built by another version of stepgym \(form 9, here 1\)"),
    ],
)
def test_damage_is_found_and_said_in_one_line(corpus: Corpus, tmp_path: Path, damage: Any, message: str) -> None:
    path = opened(corpus, tmp_path / "index")
    damage(path)
    with pytest.raises(UserError, match=message + ".*remove .*index.* and it is built again") as raised:
        opened(corpus, path)
    assert "\n" not in str(raised.value)


def test_of_a_large_file_the_ends_and_many_blocks_are_checked(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_folder, "CHECKED_WHOLE", 10_000)
    monkeypatch.setattr(index_folder, "_BLOCK", 16)
    path = opened(corpus, tmp_path / "index")
    opened(corpus, path)
    whole = (path / "big.bin").read_bytes()
    for place in (0, len(whole) - 1):
        data = bytearray(whole)
        data[place] ^= 1
        (path / "big.bin").write_bytes(data)
        with pytest.raises(UserError, match="its checksum is another"):
            opened(corpus, path)


def test_two_that_want_other_settings_in_one_place(corpus: Corpus, tmp_path: Path) -> None:
    started, answers = threading.Barrier(2), []

    def slowly(folder: Path) -> None:
        time.sleep(0.1)
        build(folder)

    def want(k1: float) -> None:
        started.wait()
        try:
            opened(corpus, tmp_path / "index", settings={"k1": k1}, build=slowly)
            answers.append("opened")
        except UserError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=want, args=(k1,)) for k1 in (0.9, 1.2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "opened" in answers
    assert [answer for answer in answers if "was built with k1" in answer]


def test_a_link_to_a_folder_elsewhere_is_followed(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    for name in ("there", "not there yet"):
        if name == "there":
            (tmp_path / "big disk" / name).mkdir()
        (tmp_path / name).symlink_to(tmp_path / "big disk" / name)
        assert opened(corpus, tmp_path / name) == tmp_path / "big disk" / name
        assert (tmp_path / name).is_symlink()
        assert opened(corpus, tmp_path / name, build=lambda folder: pytest.fail("built twice")).is_dir()


def test_a_path_that_cannot_be_looked_at_is_one_line(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the index .*xxx: File name too long"):
        opened(corpus, tmp_path / ("x" * 300))


def test_a_folder_of_something_else_is_left_alone(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is no index of stepgym's"):
        opened(corpus, tmp_path)
    with pytest.raises(UserError, match="is a file"):
        opened(corpus, tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert opened(corpus, empty) == empty
    with pytest.raises(UserError, match=r"no index of stepgym's: it has no manifest\.json"):
        IndexManifest.read(tmp_path)
