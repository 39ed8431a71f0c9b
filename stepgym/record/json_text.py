"""Free-form values as JSON text that any reader can open and that comes back as it was.

Models emit, and environments contain, what JSON and UTF-8 cannot say: lone surrogates, NaN, integers of thousands of
digits, mappings with keys that are no strings. Such a value is wrapped as `{"$stepgym": [kind, payload]}`; everything
else is plain JSON, readable without this module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MARK = "$stepgym"
_TEXT_MARK = "$stepgym:"
_MAX_INT_BITS = 12_000  # Python refuses to parse decimal integers of more than 4300 digits
# `json.dumps` would make one for each call.
_ENCODERS = {
    sort_keys: json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":"))
    for sort_keys in (False, True)
}
_MAX_DEPTH = 200  # what one stack can write, another that is deeper already must be able to read


def dump_json(value: Any, *, sort_keys: bool = False) -> str:
    """JSON text of a value, in plain UTF-8, on one line, keys in their own order unless they are to be sorted.

    Tuples become lists and numpy scalars and arrays become numbers and lists. What JSON cannot hold at all comes
    back as a string: an object of some class as its `repr`, a nesting of more than 200 levels as a note that says so.
    """
    try:
        text = _strict_dumps(value, sort_keys)
        if MARK not in text and _is_plain(value):
            text.encode()
            return text
    except (TypeError, ValueError, RecursionError):
        pass  # UnicodeEncodeError is a ValueError: a value that needs wrapping
    try:
        return _strict_dumps(_wrapped(value), sort_keys)
    except RecursionError:
        return json.dumps({MARK: ["repr", _too_deep(value)]})


def _strict_dumps(value: Any, sort_keys: bool) -> str:
    return _ENCODERS[sort_keys].encode(value)


def load_json(text: str) -> Any:
    """The value that `dump_json` wrote. Raises `ValueError` for text that is not JSON."""
    if MARK not in text:
        return json.loads(text)
    return json.loads(text, object_hook=_unwrapped)


def dump_text(text: str) -> str:
    """A string that UTF-8 can hold; nearly all strings are returned as they are."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _TEXT_MARK + _escape(text)
    return _TEXT_MARK + _escape(text) if text.startswith(_TEXT_MARK) else text


def load_text(text: str) -> str:
    """The string that `dump_text` was given."""
    return _unescape(text[len(_TEXT_MARK) :]) if text.startswith(_TEXT_MARK) else text


def _escape(text: str) -> str:
    # JSON's own \\u escapes would join a high and a low lone surrogate into one character on the way back.
    return text.encode("unicode_escape").decode("ascii")


def _unescape(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether no mapping has keys that json.dumps would turn into strings unasked, and nesting is within bounds."""
    if depth > _MAX_DEPTH:
        return False
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return False
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    return all(_is_plain(item, depth + 1) for item in items if isinstance(item, (dict, list, tuple)))


def _wrapped(value: Any, depth: int = 0) -> Any:
    """The value with everything that JSON cannot hold wrapped."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        escaped = dump_text(text)
        return text if escaped == text else {MARK: ["text", _escape(text)]}
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() <= _MAX_INT_BITS else {MARK: ["int", hex(number)]}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {MARK: ["float", str(float(value))]}
    if isinstance(value, (np.generic, np.ndarray)):
        return _wrapped(value.tolist(), depth + 1)
    if isinstance(value, bytes):
        return {MARK: ["bytes", value.hex()]}
    if depth > _MAX_DEPTH:
        return {MARK: ["repr", _too_deep(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != MARK and dump_text(key) == key for key in value):
            return {str.__str__(key): _wrapped(item, depth + 1) for key, item in value.items()}
        return {MARK: ["items", [[_wrapped(key, depth + 1), _wrapped(item, depth + 1)] for key, item in value.items()]]}
    if isinstance(value, Sequence):
        return [_wrapped(item, depth + 1) for item in value]
    return {MARK: ["repr", dump_text(repr(value))]}


def _too_deep(value: Any) -> str:
    return f"<{type(value).__name__}, nested too deeply to store>"


def _unwrapped(mapping: dict[str, Any]) -> Any:
    if mapping.keys() != {MARK}:
        return mapping
    kind, payload = mapping[MARK]
    if kind == "text":
        return _unescape(payload)
    if kind == "int":
        return int(payload, 16)
    if kind == "float":
        return float(payload)
    if kind == "bytes":
        return bytes.fromhex(payload)
    if kind == "items":
        return {tuple(key) if isinstance(key, list) else key: item for key, item in payload}
    if kind == "repr":
        return load_text(payload)
    raise ValueError(f"unknown kind of wrapped value: {kind!r}")
