"""The encyclopedia as a file of JSON lines, written once."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepgym.errors import UserError
from stepgym.home import home
from stepgym_search.document import Document
from stepgym_search.encyclopedia.article import write_article
from stepgym_search.encyclopedia.categories import WORLD_SIZE
from stepgym_search.encyclopedia.config import EncyclopediaConfig
from stepgym_search.encyclopedia.world import World

logger = logging.getLogger(__name__)


def articles(config: EncyclopediaConfig) -> Iterator[Document]:
    """Every article in order, one world at a time; their ids are their numbers, from 0."""
    for index in range(config.worlds):
        world = World(config, index)
        for slot in range(WORLD_SIZE):
            yield write_article(world, slot)


def encyclopedia_file(config: EncyclopediaConfig) -> Path:
    """The corpus as JSON lines, `{"id", "contents"}`; written at first use, under stepgym's home.

    Encyclopedias with the same texts share the file, whatever is asked about them. It is written under another name
    and then renamed, so that it is there whole or not at all, and several processes may write it at once. One that has
    another size than it was written with is written again.

    Raises:
        UserError: It cannot be written.
    """
    path = home("search", "encyclopedias", config.digest, "corpus.jsonl")
    settings = path.with_name("settings.json")
    if _is_whole(path, settings):
        return path
    logger.info("writing an encyclopedia of %d articles to %s", config.articles, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"id": a.id, "contents": a.contents}) for a in articles(config))
        size = _write_whole(path, lines)
        _write_whole(settings, [json.dumps({"bytes": size, **config.text_settings()}, indent=2)])
    except OSError as error:
        raise UserError(f"search: the encyclopedia {path} cannot be written: {error.strerror or error}") from None
    return path


def _is_whole(path: Path, settings: Path) -> bool:
    try:
        noted = json.loads(settings.read_text(encoding="utf-8"))
        return isinstance(noted, dict) and path.stat().st_size == noted.get("bytes")
    except (OSError, ValueError):
        return False


def _write_whole(path: Path, lines: Iterable[str]) -> int:
    """Write a file and return its size in bytes."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return size
