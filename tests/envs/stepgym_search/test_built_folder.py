from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from stepgym_search.built_folder import build_once

from stepgym.errors import UserError


def slowly(folder: Path) -> None:
    (folder / "begun").write_text(str(os.getpid()))
    time.sleep(0.3)
    (folder / "done").write_text(str(os.getpid()))


def build_in_process(folder: Path, answers: multiprocessing.SimpleQueue[tuple[bool, str]]) -> None:
    built = build_once(folder, slowly)
    answers.put((built, (folder / "done").read_text()))


def for_ever(folder: Path) -> None:
    (folder / "half").write_text("")
    (folder.parent / "started").write_text("")
    time.sleep(600)


def test_one_process_builds_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[tuple[bool, str]] = context.SimpleQueue()
    folder = tmp_path / "deep" / "built"
    processes = [context.Process(target=build_in_process, args=(folder, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    results = [answers.get() for _ in processes]
    assert sorted(built for built, _ in results) == [False, False, True]
    assert len({who for _, who in results}) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        build_once(tmp_path / "built", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".built.lock"]
    assert build_once(tmp_path / "built", lambda folder: (folder / "whole").touch())
    assert (tmp_path / "built" / "whole").exists()


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=build_once, args=(tmp_path / "built", for_ever))
    process.start()
    while not (tmp_path / "started").exists():
        assert process.is_alive()
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert not (tmp_path / "built").exists()
    assert list(tmp_path.glob(".built.*.building"))
    build_once(tmp_path / "built", lambda folder: (folder / "whole").touch())
    assert list(tmp_path.glob(".built.*.building")) == []
    assert [path.name for path in (tmp_path / "built").iterdir()] == ["whole"]


def test_a_build_leaves_that_of_a_similar_name_alone(tmp_path: Path) -> None:
    def build_another(folder: Path) -> None:
        (folder / "half").touch()
        build_once(tmp_path / "built", lambda folder: None)
        assert (folder / "half").exists()

    assert build_once(tmp_path / "built.v2", build_another)


def test_a_folder_that_is_there_and_not_built_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "old").touch()

    def is_built(folder: Path) -> bool:
        return (folder / "new").exists()

    assert build_once(folder, lambda folder: (folder / "new").touch(), is_built=is_built)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert not build_once(folder, lambda folder: pytest.fail("built twice"), is_built=is_built)


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*STEPGYM_HOME"):
        build_once(tmp_path / "file" / "built", lambda folder: None)


def test_a_place_that_cannot_be_looked_at_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*xxx: File name too long"):
        build_once(tmp_path / ("x" * 300), lambda folder: None)

    def is_built(folder: Path) -> bool:
        raise PermissionError(13, "Permission denied")  # what another user's private folder says to all but root

    with pytest.raises(UserError, match=r"cannot write .*Permission denied"):
        build_once(tmp_path / "theirs", lambda folder: None, is_built=is_built)
