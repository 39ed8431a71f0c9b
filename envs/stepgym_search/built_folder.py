"""Folders that are built once and used by many processes: nobody sees one that is half built."""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepgym.errors import UserError
from stepgym.home import HOME_VARIABLE

logger = logging.getLogger(__name__)


def build_once(folder: Path, build: Callable[[Path], None], *, is_built: Callable[[Path], bool] = Path.exists) -> bool:
    """Make a folder unless it is there.

    `build` fills a temporary folder beside it, which then takes its place in one move; a build that fails or is killed
    leaves nothing that could be taken for a folder. One process builds, others that want the same folder wait for it.

    Args:
        folder: Where it shall be. Its parents are made.
        build: Writes the files into the empty folder that it is given.
        is_built: Tells whether `folder` is there already. One that is there and is not built is replaced.

    Returns:
        Whether it was built by this call.

    Raises:
        UserError: The place cannot be written to.
    """
    try:
        if is_built(folder):
            return False
        with _locked(folder):
            if is_built(folder):
                return False
            _remove_leftovers(folder)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".building", dir=folder.parent))
            try:
                build(temporary)
                temporary.chmod(0o755)  # mkdtemp's folders are private; what is built may be shared
                if folder.is_dir():
                    shutil.rmtree(folder)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}; make room or rights there, name another place, or set "
            f"{HOME_VARIABLE}"
        ) from None
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    # Of builders that were killed: the lock is ours, so none of them works any more.
    ours = re.compile(rf"\.{re.escape(folder.name)}\.[^.]+\.building")
    for leftover in folder.parent.iterdir():
        if ours.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
            logger.info("removed %s, which a killed build had left", leftover)
