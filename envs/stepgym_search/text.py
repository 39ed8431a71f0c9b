"""Text that any encoding can take: queries of models, passages of corpora, answers of servers."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with every lone surrogate as U+FFFD.

    Python's strings may hold halves of characters (`\\ud83d`), which JSON can write and no encoding has: tokenizers and
    parsers of other languages refuse them. Two halves that belong together become their character.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
