"""Queries as any retriever can take them."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with every lone surrogate as U+FFFD.

    Python's strings may hold halves of characters (`\\ud83d`), which no encoding has: tokenizers and JSON parsers of
    other languages refuse them. Two halves that belong together become their character.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
