from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from stepgym.env.resources import Resources, kept_by_the_process, left_behind, private_temporary_folder


def test_open_files_threads_and_children_are_seen_and_their_end_too(tmp_path: Path) -> None:
    before = Resources.now()
    assert left_behind(before, patience=0) == []
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="waiting", daemon=True)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    path = tmp_path / "open"
    with path.open("w"):
        lines = left_behind(before, patience=0)
    assert "thread 'waiting'" in lines
    assert f"open file {path}" in lines
    assert any(line.startswith(f"process {child.pid} (") for line in lines)
    release.set()
    thread.join()
    child.kill()
    child.wait()
    assert left_behind(before) == []


def test_opening_a_file_again_is_no_leak_and_opening_it_twice_is(tmp_path: Path) -> None:
    path = tmp_path / "one"
    first = path.open("w")
    before = Resources.now()
    first.close()
    with path.open():
        assert left_behind(before, patience=0) == []
        with path.open():
            assert left_behind(before, patience=0) == [f"open file {path}"]


def test_temporary_files_go_to_a_folder_of_our_own() -> None:
    outside = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with private_temporary_folder() as listing:
        assert listing() == []
        os.close(tempfile.mkstemp(prefix="mine-")[0])
        subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp(prefix='theirs-')"], check=True)
        folder = Path(tempfile.gettempdir())
        assert [name.partition("-")[0] for name in listing()] == ["mine", "theirs"]
    assert not folder.exists()
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == outside


def test_what_the_process_keeps_is_no_leak(tmp_path: Path) -> None:
    before = Resources.now()
    with kept_by_the_process():
        kept = (tmp_path / "kept").open("w")
    with kept, (tmp_path / "left").open("w"):
        assert Resources.now().more_than(before) == [f"open file {tmp_path / 'left'}"]
