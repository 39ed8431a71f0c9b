"""Where a built index lies, and how it is known to be the right one, and whole."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepgym.errors import UserError
from stepgym.home import home
from stepgym_search.built_folder import build_once
from stepgym_search.corpus import Corpus

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
VERSION = 1
CHECKED_WHOLE = 512 * 2**20
"""Bytes. Files up to this size are read whole at every opening; of larger ones `_BLOCKS` evenly spaced blocks."""

_BLOCKS = 256
_BLOCK = 64 * 2**10


@dataclass(frozen=True)
class IndexManifest:
    """What an index is of, and of which files it is made.

    Attributes:
        version: Of the manifest's own form.
        kind: The kind of retriever.
        settings: What the index depends on, besides the corpus (the analyser, the model).
        corpus: The digest of the corpus.
        rows: Passages in it.
        files: For each file, by its path in the folder, `bytes` and `checksum` (crc32 of the whole file, or of blocks
            of it where it is larger than `CHECKED_WHOLE`).
    """

    version: int
    kind: str
    settings: dict[str, Any]
    corpus: str
    rows: int
    files: dict[str, dict[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, folder: Path) -> IndexManifest:
        """The manifest of an index folder.

        Raises:
            UserError: There is none, or it cannot be read.
        """
        again = f"remove {folder} and it is built again"
        try:
            fields = json.loads((folder / MANIFEST).read_bytes())
            version = fields["version"]
            if version == VERSION:
                manifest = cls(**fields)
                numbers = [entry[key] for entry in manifest.files.values() for key in ("bytes", "checksum")]
                if not all(isinstance(number, int) for number in numbers) or not isinstance(manifest.settings, dict):
                    raise ValueError("sizes and checksums are whole numbers, settings have names")
                return manifest
        except FileNotFoundError:
            raise UserError(f"{folder} is no index of stepgym's: it has no {MANIFEST}") from None
        except OSError as error:
            raise UserError(f"cannot read {folder / MANIFEST}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{folder / MANIFEST} is damaged: {again}") from None
        raise UserError(f"{folder} was built by another version of stepgym (form {version}, here {VERSION}): {again}")


def open_index_folder(
    corpus: Corpus,
    *,
    kind: str,
    settings: Mapping[str, Any],
    build: Callable[[Path], None],
    index_path: str | Path | None = None,
) -> Path:
    """The folder of an index of a corpus: found and checked, or built.

    Checked are the kind, the settings, the corpus digest and the number of passages, and of every file the size and a
    checksum: of all its bytes up to 512 MiB, of 256 evenly spaced blocks of 64 KiB beyond. So damage to
    a larger file can go unseen here; whoever reads it has to check what it reads.

    Args:
        corpus: What is searched.
        kind: The kind of retriever.
        settings: All that the index depends on besides the corpus, as JSON.
        build: Writes the files of the index into the empty folder that it is given.
        index_path: The folder. By default one under `stepgym.home` whose name says what it is of. One that is not there
            is built.

    Raises:
        UserError: The folder holds something else, an index of another corpus or with other settings, or a damaged one.
    """
    wanted = json.loads(json.dumps(dict(settings)))
    if index_path is None:
        key = json.dumps([VERSION, kind, wanted, corpus.digest], sort_keys=True)
        name = f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        folder = home("search", "indexes", name).absolute()
    else:
        folder = _named_folder(index_path, kind)

    def build_all(temporary: Path) -> None:
        started = time.monotonic()
        logger.info("building the index %s of %s passages in %s", kind, len(corpus), folder)
        build(temporary)
        _write_manifest(temporary, kind, wanted, corpus)
        logger.info("built the index %s in %.1f s", kind, time.monotonic() - started)

    if not build_once(folder, build_all, is_built=lambda folder: (folder / MANIFEST).exists()):
        _check(folder, kind, wanted, corpus)
    return folder


def _named_folder(index_path: str | Path, kind: str) -> Path:
    """The folder that a path names, behind all links; it is an index, empty, or not there."""
    try:
        folder = Path(index_path).expanduser().resolve()
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: an index of the retriever {kind} is a folder")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UserError(f"{folder} is no index of stepgym's: name an index, or a new folder to build one in")
    except OSError as error:
        raise UserError(f"cannot read the index {index_path}: {error.strerror or error}") from None
    return folder


def _write_manifest(folder: Path, kind: str, settings: dict[str, Any], corpus: Corpus) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "checksum": _checksum(path)}
        for path in paths
    }
    manifest = IndexManifest(VERSION, kind, settings, corpus.digest, len(corpus), files)
    (folder / MANIFEST).write_text(json.dumps(manifest.to_dict(), indent=2) + "\n", encoding="utf-8")


def _check(folder: Path, kind: str, settings: dict[str, Any], corpus: Corpus) -> None:
    manifest = IndexManifest.read(folder)
    again = f"remove {folder} and it is built again, or name another index_path"
    if manifest.kind != kind:
        raise UserError(f"{folder} is an index of the retriever {manifest.kind}, not {kind}: name another index_path")
    if manifest.corpus != corpus.digest or manifest.rows != len(corpus):
        raise UserError(
            f"{folder} is an index of another corpus than {corpus.path} ({manifest.rows} passages, now {len(corpus)}), "
            f"or the corpus was changed since: {again}"
        )
    for name in sorted(manifest.settings.keys() | settings.keys()):
        there, here = manifest.settings.get(name), settings.get(name)
        if there != here:
            raise UserError(f"{folder} was built with {name} {json.dumps(there)}, not {json.dumps(here)}: {again}")
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise UserError(f"{path} is damaged ({size} bytes, not {entry['bytes']}): {again}")
            if _checksum(path) != entry["checksum"]:
                raise UserError(f"{path} is damaged (its checksum is another): {again}")
        except FileNotFoundError:
            raise UserError(f"{path} is missing: {again}") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None


def _checksum(path: Path) -> int:
    """crc32 of a file; where it is larger than `CHECKED_WHOLE`, of blocks of it, the first and the last among them."""
    size = path.stat().st_size
    checksum = 0
    with path.open("rb") as file:
        if size <= CHECKED_WHOLE:
            while block := file.read(2**22):
                checksum = zlib.crc32(block, checksum)
            return checksum
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            checksum = zlib.crc32(file.read(_BLOCK), checksum)
    return checksum
