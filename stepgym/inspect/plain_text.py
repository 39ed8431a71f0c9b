"""Text that somebody else wrote (a model, an environment) as text that a terminal only shows.

A terminal obeys control characters: it moves, erases, retitles, and may even answer. What a model said is untrusted,
so every one of them is shown as an escape and none reaches the terminal.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e", "\0": "\\0"}
_SUSPECTS = re.compile("[^\\x20-\\x7e\\n]")
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that steer instead of showing: controls, bidirectional marks, lone surrogates, unassigned."""


def plain(text: str, *, lines: bool = False) -> str:
    """The text with all that would steer a terminal escaped: control characters, bidirectional marks, surrogates.

    Args:
        text: Any text.
        lines: Keep line feeds and tabs (as four spaces) instead of escaping them; the result may have many lines.
    """
    if lines:
        text = text.replace("\r\n", "\n").expandtabs(4)
    escaped = _SUSPECTS.sub(lambda match: _escape(match[0]), text)
    return escaped if lines else escaped.replace("\n", "\\n")


@cache
def _escape(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, limit: int) -> str:
    """The text, or its two ends with a note between them of how many characters were cut."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]} [… {len(text) - limit:,} characters cut …] {text[-tail:] if tail else ''}"
