"""Comparing an answer with the golden ones, the way SQuAD and Search-R1 do, in any script.

Both sides are normalised: lower case, no punctuation, no a/an/the, single spaces. On ASCII texts that is what Search-R1
does, to the letter. Beyond ASCII its rules leave much unequal that readers take for the same, so here texts are first
brought to one form (Unicode NFKC: full-width digits, composed and decomposed letters), case is folded in every script
(`STRASSE` and `Straße`), punctuation is what Unicode calls punctuation (quotation marks, dashes, 。) and invisible
formatting characters count for nothing. Accents count.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable
from typing import Literal, TypeAlias

Match: TypeAlias = Literal["exact", "substring"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """A text as it is compared; empty where nothing is left of it."""
    plain = text.isascii()
    text = text.casefold() if plain else unicodedata.normalize("NFKC", text).casefold()
    text = "".join(character for character in text if not _is_left_out(character))
    if not plain:  # folding takes letters apart, and what stood between two parts of one may be gone
        text = unicodedata.normalize("NFKC", text)
    return " ".join(_ARTICLES.sub(" ", text).split())


def golden_texts(answers: object) -> tuple[str, ...]:
    """The golden answers that something can match: texts (and numbers) that do not normalise to nothing."""
    given = answers if isinstance(answers, list | tuple) else [answers]
    texts = [str(answer) for answer in given if isinstance(answer, str | int | float) and not isinstance(answer, bool)]
    return tuple(text for text in texts if normalize_answer(text))


def is_match(answer: str, golden: Iterable[str], match: Match = "exact") -> bool:
    """Whether an answer is one of the golden ones.

    Args:
        answer: What the agent answered. What normalises to nothing matches nothing.
        golden: The golden answers; one that normalises to nothing is matched by nothing.
        match: `exact` wants one of them and nothing else; `substring` is content where one stands anywhere in the
            answer, even inside a word, as published.
    """
    given = normalize_answer(answer)
    if not given:
        return False
    wanted = [text for text in map(normalize_answer, golden) if text]
    return given in wanted if match == "exact" else any(text in given for text in wanted)


def _is_left_out(character: str) -> bool:
    if character.isascii():
        return character in _ASCII_PUNCTUATION
    category = unicodedata.category(character)
    return category == "Cf" or category.startswith("P")
