"""Text to the words that an index has: what Lucene's English analyser makes of it, near enough."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from stepgym.errors import UserError
from stepgym.plugins import unknown

StopWords = Literal["lucene", "none"]

# fmt: off
LUCENE_STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will",
    "with",
})
# fmt: on
"""What Lucene's EnglishAnalyzer leaves out."""

LONGEST_WORD = 255
"""Characters; a longer word is cut into words of this length, as Lucene does."""

NO_STEMMER = "none"

# The rules for word boundaries of Unicode (UAX #29, WB3 to WB13), by the names of its properties. As in Lucene, runs of
# scripts written without spaces (Thai, Khmer; line break SA) are words, and so is each ideograph, each Hiragana sign.
_LETTER = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}--\p{LB=SA}]"
_HEBREW = r"\p{WB=Hebrew_Letter}"
_DIGIT = r"\p{WB=Numeric}"
_KATAKANA = r"\p{WB=Katakana}"
_JOINS = r"\p{WB=ExtendNumLet}"
_MARK = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]"
_BETWEEN_LETTERS = r"[\p{WB=MidLetter}\p{WB=MidNumLet}']"
_BETWEEN_DIGITS = r"[\p{WB=MidNum}\p{WB=MidNumLet}']"
_WORDS = rf"""(?V1x)
    (?:(?<!{_JOINS}){_JOINS}++)?[{_LETTER}{_DIGIT}][{_LETTER}{_DIGIT}{_JOINS}{_MARK}]*+
      (?:(?: (?<={_LETTER}{_MARK}*){_BETWEEN_LETTERS}{_MARK}*(?={_LETTER})
           | (?<={_DIGIT}{_MARK}*){_BETWEEN_DIGITS}{_MARK}*(?={_DIGIT})
           | (?<={_HEBREW}{_MARK}*)(?:'|"(?={_HEBREW}))
         )[{_LETTER}{_DIGIT}{_JOINS}{_MARK}]*+
      )*+
    | \p{{LB=SA}}[\p{{LB=SA}}{_MARK}]*+
    | [\p{{Han}}\p{{Hiragana}}]{_MARK}*
    | (?:(?<!{_JOINS}){_JOINS}++)?{_KATAKANA}[{_KATAKANA}{_JOINS}{_MARK}]*
    | (?:\p{{Regional_Indicator}}{_MARK}*+){{2}}
    | [\p{{Extended_Pictographic}}\p{{Emoji_Modifier}}](?:\u200d\p{{Extended_Pictographic}}|{_MARK})*
"""
# The same for ASCII, with Python's own `re`: most texts, in a quarter of the time.
_ASCII_WORDS = re.compile(
    r"(?:(?<!_)_++)?[A-Za-z0-9][A-Za-z0-9_]*+"
    r"(?:(?:(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[.,;'](?=[0-9]))[A-Za-z0-9_]++)*+"
)


class Analyzer:
    """Makes of a text the words that are looked up, in order.

    It does what Lucene's English analyser does, which is pyserini's default: words by Unicode's rules for word
    boundaries (each ideograph is a word, each emoji too), possessive 's cut, lower case, stop words left out, Porter's
    stemmer. It is known to differ in this: Lucene follows Porter's later program, which stems words in -bly and -logy
    further (possibl, technolog) than his paper, which PyStemmer follows (possibli, technologi); and a stray joiner
    beside an emoji, or an underscore beside Katakana, may part words otherwise. Safe to use from many threads.

    Args:
        stemmer: An algorithm of PyStemmer by name (`porter`, `german`), or `none`.
        stop_words: `lucene`: leave out Lucene's 33 English ones; `none`: leave out nothing.

    Raises:
        UserError: There is no such stemmer, or a library is missing.
    """

    def __init__(self, *, stemmer: str = "porter", stop_words: StopWords = "lucene") -> None:
        # Imported here: half a second that an environment with a server elsewhere need not spend.
        try:
            import regex
            import Stemmer
        except ImportError as error:
            raise UserError(
                f"search: the retriever bm25s needs the package {error.name!r}: pip install 'stepgym[search]'"
            ) from None
        known = [*Stemmer.algorithms(), NO_STEMMER]
        if stemmer not in known:
            raise UserError(f"search: retriever: {unknown('stemmer', stemmer, known)}")
        self._words = regex.compile(_WORDS)
        self._stemmer = None if stemmer == NO_STEMMER else _ThreadsOwn(lambda: Stemmer.Stemmer(stemmer, 0))
        self._stop_words = LUCENE_STOP_WORDS if stop_words == "lucene" else frozenset()
        self._term = lru_cache(maxsize=2**18)(self._make_term)

    def __call__(self, text: str) -> list[str]:
        """The words of a text, as an index has them; lone surrogates and control characters are no words."""
        term = self._term
        words = (_ASCII_WORDS if text.isascii() else self._words).findall(text)
        return [each for word in words for each in term(word)]

    def _make_term(self, word: str) -> tuple[str, ...]:
        if len(word) > LONGEST_WORD:
            parts = (word[start : start + LONGEST_WORD] for start in range(0, len(word), LONGEST_WORD))
            return tuple(term for part in parts for term in self._make_term(part))
        if word[-2:] in {"'s", "'S", "\u2019s", "\u2019S", "\uff07s", "\uff07S"}:
            word = word[:-2]
        # Character by character, as Java does: Python's `lower` makes two characters of İ.
        word = word.lower() if word.isascii() else "".join(character.lower()[0] for character in word)
        if word in self._stop_words:
            return ()
        # Lucene's and Porter's own program leave the shortest words alone; PyStemmer makes "us" to "u".
        if self._stemmer is None or len(word) <= 2:
            return (word,)
        return (self._stemmer.get().stemWord(word),)


class _ThreadsOwn(threading.local):
    """One thing for each thread: a Stemmer is not made for two, and a lock could be held for ever after a fork."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._thing = make()

    def get(self) -> Any:
        return self._thing
