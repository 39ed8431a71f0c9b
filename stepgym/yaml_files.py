"""YAML 1.2 files and the overrides of the command line, as plain Python values.

YAML 1.2, not 1.1: `1e-6` is a number and `no` is text. Dates stay text, so that everything read here is JSON.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from stepgym.errors import UserError


class _PlainConstructor(SafeConstructor):
    """Constructs JSON values only: dates stay text; sets, binary data and application tags are refused."""


_PlainConstructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)
for _tag in ("binary", "set", "omap", "pairs"):
    _PlainConstructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_undefined)


def load_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping; an empty file is an empty mapping.

    Raises `UserError` in one line: a missing or unreadable file, a syntax error or a duplicate key with file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a mapping of fields at the top level, got {type(value).__name__}")
    return value


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML 1.2 text. Raises `UserError` that begins with `where` and the line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _PlainConstructor
    try:
        value = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{where}{line}: {_problem(error)}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not YAML: {' '.join(str(error).split())}") from None
    _check_plain(value, where, ())
    return value


def _problem(error: MarkedYAMLError) -> str:
    problem = " ".join(str(error.problem or error.context or error).split())
    if problem.startswith("found duplicate key"):
        return problem.split(" with value ")[0].replace("found ", "")
    return problem


def _check_plain(value: Any, where: str, above: tuple[int, ...]) -> None:
    """Refuse what JSON cannot hold: keys that are not text, and values that contain themselves."""
    if not isinstance(value, dict | list):
        return
    if id(value) in above:
        raise UserError(f"{where}: an alias refers to the value that contains it")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{where}: the key {key!r} must be text; put it in quotes")
    for item in value.values() if isinstance(value, dict) else value:
        _check_plain(item, where, (*above, id(value)))


def apply_overrides(
    config: Mapping[str, Any], overrides: Iterable[str], *, sections: Collection[str] = ()
) -> dict[str, Any]:
    """A copy of a config with dotted overrides such as `engine.temperature=0.7` applied in order.

    A value is read as YAML. Where the path names a section that has a `kind`, plain text (`engine=vllm`) switches its
    kind and resets the rest of the section. A number in a path is an index into a list.

    Args:
        config: The config; it is not changed.
        overrides: Texts of the form `a.b=value`.
        sections: Dotted paths that have a `kind` even where the config does not mention them yet.

    Raises:
        UserError: An override is not of that form, or its path leads through something that is not a section.
    """
    result = copy.deepcopy(dict(config))
    for override in overrides:
        path, separator, text = override.partition("=")
        path = path.strip()
        if not separator or not path or not all(path.split(".")):
            raise UserError(f"override {override!r}: expected name=value or section.name=value")
        _set(result, path.split("."), _parse_override(text, override), override, path in sections)
    return result


def _parse_override(text: str, override: str) -> Any:
    value = parse_yaml(text, f"override {override!r}")
    # `note=a: b` would be a mapping by YAML's rules; on a command line people mean the text. Braces make a mapping.
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text
    return value


def _set(config: dict[str, Any], path: list[str], value: Any, override: str, has_kind: bool) -> None:
    place: Any = config
    for position, name in enumerate(path[:-1]):
        if isinstance(place, dict):
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
        else:
            place = place[_index(place, name, override)]
        if not isinstance(place, dict | list):
            raise UserError(_not_a_section(path[: position + 1], place, override))
    name = path[-1]
    if isinstance(place, list):
        index = _index(place, name, override)
        place[index] = _switched(place[index], value, has_kind)
    else:
        place[name] = _switched(place.get(name), value, has_kind)


def _switched(present: Any, value: Any, has_kind: bool) -> Any:
    if isinstance(value, str) and (has_kind or (isinstance(present, dict) and "kind" in present)):
        return {"kind": value}
    return value


def _not_a_section(path: list[str], value: Any, override: str) -> str:
    return f"override {override!r}: {'.'.join(path)!r} is {value!r}, not a section"


def _index(place: list[Any], name: str, override: str) -> int:
    if not name.isdecimal() or int(name) >= len(place):
        raise UserError(f"override {override!r}: {name!r} is not an index into a list of {len(place)}")
    return int(name)
