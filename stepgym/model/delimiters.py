"""Delimiters that are tokens: what merely spells one is told apart from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

from stepgym.record.step import Ids


class Delimiters:
    """Finds the delimiters of reasoning and tool calls in a sampled turn.

    A delimiter that is one token of the tokenizer counts only where that token was sampled; text that spells it with
    other tokens is text. One that is several tokens is matched in the text.

    Args:
        texts: The delimiters.
        encode: Text to ids.
        decode: Ids to text.
    """

    def __init__(self, texts: Iterable[str], encode: Callable[[str], Ids], decode: Callable[[Ids], str]) -> None:
        self._decode = decode
        encoded = {text: encode(text).tolist() for text in dict.fromkeys(texts) if text}
        self.tokens: dict[str, int] = {text: ids[0] for text, ids in encoded.items() if len(ids) == 1}
        """Ids of the delimiters that are one token."""

    def shadow(self, text: str, ids: Ids) -> str:
        """The decoded text with every delimiter blotted out that no token stands for. As long as `text`.

        Args:
            text: What `ids` decode to.
            ids: int32 array [R].
        """
        blotted = text
        for delimiter, token in self.tokens.items():
            if delimiter not in text:
                continue
            places = np.flatnonzero(ids == token)
            if len(places) == text.count(delimiter):
                continue
            real, length, start = set(), 0, 0
            for place in places.tolist():
                length += len(self._decode(ids[start:place]))
                real.add(length)
                start = place
            blotted = re.sub(re.escape(delimiter), lambda m, real=real: _blot(m, real), blotted)  # type: ignore[misc]
        return blotted


def _blot(found: re.Match[str], real: set[int]) -> str:
    return found.group() if found.start() in real else "\0" * len(found.group())
