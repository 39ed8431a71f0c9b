"""Reads the rows of a data set: from a file, a folder with a file for each split, or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stepgym.errors import UserError

_SUFFIXES = (".parquet", ".json", ".jsonl")
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


class Row(NamedTuple):
    """One row of a data set and where it stands.

    Attributes:
        place: The file, or the name on the hub with the split, as an error names it.
        number: Its position there, from 0.
        row: What stands there; a mapping if all is well.
    """

    place: str
    number: int
    row: Any


def read_rows(source: str, split: str, *, where: str) -> Iterator[Row]:
    """The rows of one split of a data set.

    Args:
        source: A .parquet, .json or .jsonl file; a folder with files whose names begin with the split; or a name on
            the hub, with its config after a colon where it has several (`owner/name:config`). `#name` at the end
            chooses another split.
        split: The split that is wanted; a single file is read whatever the split.
        where: Begins every error (`sql`).

    Raises:
        UserError: There is no such data set, it cannot be read, or it has no rows.
    """
    name, _, chosen = source.partition("#")
    split = chosen or split
    rows = False
    for place, found in _tables(name, split, where):
        for number, row in enumerate(found):
            rows = True
            yield Row(place, number, row)
    if not rows:
        raise UserError(f"{where}: {source} has no rows")


def _tables(name: str, split: str, where: str) -> Iterator[tuple[str, Iterable[Any]]]:
    path = Path(name).expanduser()
    hub = _HUB_NAME.fullmatch(name)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.stem.startswith(split))
        if not files:
            raise UserError(f"{where}: {path} has no file {split}*.parquet, {split}*.json or {split}*.jsonl")
        yield from ((str(file), _from_file(file, where)) for file in files)
    elif path.is_file():
        yield str(path), _from_file(path, where)
    elif path.suffix in _SUFFIXES or hub is None:
        raise UserError(f"{where}: there is no data set {name}: neither a file or folder, nor a name on the hub")
    else:
        yield f"{name}[{split}]", _from_hub(hub[1], hub[2], split, where)


def _from_file(file: Path, where: str) -> Iterator[Any]:
    if file.suffix not in _SUFFIXES:
        raise UserError(
            f"{where}: {file}: a data set is a {', '.join(_SUFFIXES)} file, not {file.suffix or 'one without suffix'}"
        )
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=4096):
                    yield from batch.to_pylist()
            return
        with file.open(encoding="utf-8") as lines:
            if file.suffix == ".jsonl":
                # Lines of the file, not of the text: a JSON string may hold other line separators as they are.
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _from_line(line, f"{where}: {file}, line {number}")
                return
            content = json.load(lines)
    except (OSError, ValueError) as error:  # pyarrow's errors and those of json are ValueErrors
        raise UserError(f"{where}: {file} cannot be read: {_first_line(error)}") from None
    if not isinstance(content, list):
        raise UserError(f"{where}: {file} must hold a list of rows, not {type(content).__name__}")
    yield from content


def _from_line(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} cannot be read: {_first_line(error)}") from None


def _from_hub(name: str, config: str | None, split: str, where: str) -> Iterable[Any]:
    import datasets

    try:
        rows: Iterable[Any] = datasets.load_dataset(name, config, split=split)
        return rows
    except Exception as error:  # whatever the hub and the network raise
        shown = f"{name}:{config}" if config else name
        text = f"{where}: {shown}, split {split!r}, cannot be loaded from the hub: {_first_line(error)}"
        raise UserError(text) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
