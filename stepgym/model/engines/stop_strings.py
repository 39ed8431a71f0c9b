"""Finds out, token by token, whether a response holds a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.record.step import Ids

REPLACEMENT = "\ufffd"


class StopStrings:
    """The stop strings of requests, against one tokenizer's vocabulary.

    Looking at the text after every token would cost more than sampling it. A token can only complete a stop string if
    its own text holds the string's last character, or part of a character; only then is the text looked at.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._texts: list[str] | None = None
        self._tables: dict[tuple[str, ...], NDArray[np.bool_]] = {}

    def may_complete(self, stop: Sequence[str]) -> NDArray[np.bool_]:
        """bool [vocabulary]: whether a token may be the last one of a stop string."""
        key = tuple(stop)
        table = self._tables.get(key)
        if table is None:
            if self._texts is None:
                known = min(self._vocab_size, len(self._tokenizer))
                self._texts = [self._decode([token]) for token in range(known)]
            last = {text[-1] for text in key if text}
            table = np.zeros(self._vocab_size, dtype=np.bool_)
            for token, text in enumerate(self._texts):
                table[token] = REPLACEMENT in text or not last.isdisjoint(text)
            self._tables[key] = table
        return table

    def completed(self, response_ids: Ids, stop: Sequence[str]) -> bool:
        """Whether the text of the response holds a stop string that its last token completed."""
        # Every token is a byte at least, so a stop string of n bytes lies within the last n tokens. The few more keep
        # what a tokenizer strips at the beginning of a text out of it.
        window = max((len(text.encode("utf-8", "surrogatepass")) for text in stop), default=0) + 4
        text = self._decode([int(token) for token in response_ids[-window:]])
        return any(part in text for part in stop if part)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
