from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from stepgym_sql.folder import DatabaseFolder
from stepgym_sql.generate.world import WorldSpec


def test_databases_are_built_once_and_the_oldest_goes_first() -> None:
    folder = DatabaseFolder(keep=2)
    try:
        specs = [WorldSpec("shop", seed, rows=6) for seed in range(3)]
        first = folder.path_of(specs[0])
        content, stamp = first.read_bytes(), first.stat().st_mtime_ns
        second = folder.path_of(specs[1])
        assert folder.path_of(specs[0]) == first
        assert first.stat().st_mtime_ns == stamp
        folder.path_of(specs[2])
        assert first.exists()
        assert not second.exists()
        folder.path_of(specs[1])
        assert not first.exists()
        assert folder.path_of(specs[0]).read_bytes() == content
    finally:
        folder.close()
    assert not first.parent.exists()


def test_threads_may_ask_at_the_same_time() -> None:
    folder = DatabaseFolder(keep=4)
    try:
        with ThreadPoolExecutor(8) as threads:
            paths = list(threads.map(lambda n: folder.path_of(WorldSpec("bank", n % 3, rows=6)), range(60)))
        assert len(set(paths)) == 3
        assert len(list(paths[0].parent.iterdir())) == 3
    finally:
        folder.close()
    folder.close()
