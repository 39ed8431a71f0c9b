"""Reads rows of the SkyRL-SQL data sets, from files or the hub, and finds their databases.

A row has `prompt` (a list of messages), `db_id`, `data` (synsql, spider or bird; any other is taken for a folder under
the root) and `reward_spec.ground_truth` (the gold query). Every row is checked when a split is loaded, so that a
missing field or database shows before a run starts, with the row and the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgym.env.rows import read_rows
from stepgym.env.task import Task
from stepgym.errors import UserError

DATABASE_FOLDERS: Mapping[str, str] = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}

_SQLITE_HEADER = b"SQLite format 3\0"


def load_rows(source: str, split: str, database_root: str | None) -> list[Task]:
    """The tasks of a data set.

    Args:
        source: A file, a folder or a name on the hub; see `stepgym.env.rows.read_rows`.
        split: The split that is wanted.
        database_root: The folder that the databases lie in.

    Raises:
        UserError: Something is missing or not what it should be; names the file, the row and the field.
    """
    if database_root is None:
        raise UserError("sql: a data set needs `database_root`, the folder that its databases lie in")
    root = Path(database_root).expanduser()
    if not root.is_dir():
        raise UserError(f"sql: database_root: {root} is not a folder")
    checked: set[Path] = set()
    rows = enumerate(read_rows(source, split, where="sql"))
    return [_task(row, place, number, index, root, checked) for index, (place, number, row) in rows]


def _task(row: Any, where: str, number: int, index: int, root: Path, checked: set[Path]) -> Task:
    place = f"sql: {where}, row {number}"
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a row is a mapping, not {type(row).__name__}")
    messages = _messages(row, place)
    db_id, data = _text(row, "db_id", place), _text(row, "data", place)
    for field, value in (("db_id", db_id), ("data", data)):
        if value in (".", "..") or re.search(r"[/\\\0]", value):
            raise UserError(f"{place}, field {field!r}: {value!r} is not the name of a folder")
    spec = row.get("reward_spec")
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except ValueError:
            spec = None
    if not isinstance(spec, Mapping):
        raise UserError(f"{place}: no field 'reward_spec' with a 'ground_truth' in it")
    gold = _text(spec, "ground_truth", f"{place}, field 'reward_spec'")
    relative = Path(DATABASE_FOLDERS.get(data, data), db_id, f"{db_id}.sqlite")
    _check_database(root / relative, f"{place}, field 'db_id'", checked)
    return Task(
        id=f"{data}/{db_id}/{index}",
        prompt=next(message["content"] for message in reversed(messages) if message["role"] == "user"),
        answer=gold,
        data={"db_id": db_id, "data": data, "database": relative.as_posix(), "messages": messages},
    )


def _messages(row: Mapping[str, Any], place: str) -> list[dict[str, str]]:
    if "prompt" not in row:
        raise UserError(f"{place}: no field 'prompt'; it has {', '.join(sorted(map(str, row)))}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = []
    for message in prompt if isinstance(prompt, list) else [None]:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise UserError(f"{place}, field 'prompt': expected a list of messages with 'role' and 'content'")
        messages.append({"role": message["role"], "content": message["content"]})
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{place}, field 'prompt': no message has the role 'user'")
    return messages


def _text(row: Mapping[str, Any], field: str, place: str) -> str:
    if field not in row:
        raise UserError(f"{place}: no field {field!r}; it has {', '.join(sorted(map(str, row)))}")
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}, field {field!r}: expected text, not {value!r:.80}")
    return value


def _check_database(path: Path, place: str, checked: set[Path]) -> None:
    if path in checked:
        return
    try:
        with path.open("rb") as file:
            header = file.read(len(_SQLITE_HEADER))
    except OSError:
        raise UserError(f"{place}: there is no database {path}") from None
    if header != _SQLITE_HEADER:
        raise UserError(f"{place}: {path} is not an SQLite database")
    checked.add(path)
