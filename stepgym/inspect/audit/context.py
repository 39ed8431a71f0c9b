"""Tokens as text, with one of them marked."""

from __future__ import annotations

from collections.abc import Callable

from stepgym.record.step import Ids, Step

WINDOW = 8
"""Tokens shown before and after the marked one."""


def tokens_in_context(step: Step, position: int, decode: Callable[[Ids], str] | None, window: int = WINDOW) -> str:
    """The tokens around a position of prompt + response: as text, or as ids where there is no tokenizer.

    The marked token stands between `⟦` and `⟧`; `‖` stands where the response begins. Line ends are shown as `\\n`.
    """
    if step.prompt_ids is None or step.response_ids is None or not 0 <= position < step.length:
        return ""
    boundary = len(step.prompt_ids)
    low, high = max(0, position - window), min(step.length, position + window + 1)

    def show(start: int, end: int) -> str:
        shown = []
        for part, offset in ((step.prompt_ids, 0), (step.response_ids, boundary)):
            assert part is not None
            piece = part[max(0, start - offset) : max(0, end - offset)]
            if offset and start <= boundary < end:
                shown.append("‖")
            if len(piece):
                shown.append(_plain(decode(piece)) if decode is not None else " ".join(map(str, piece.tolist())))
        return "".join(shown) if decode is not None else " ".join(shown)

    gap = "" if decode is not None else " "
    marked = show(position, position + 1)
    before, bar = ("‖", "") if marked.startswith("‖") else ("", marked)
    marked = marked.removeprefix("‖").strip(" ") if decode is None else (bar or marked.removeprefix("‖"))
    text = f"{show(low, position)}{gap}{before}⟦{marked}⟧{gap}{show(position + 1, high)}"
    return ("…" if low else "") + text.strip(" " if decode is None else "") + ("…" if high < step.length else "")


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def snippet(text: str, at: int, length: int = 40) -> str:
    """A piece of a text from a position on, quoted, on one line."""
    piece = text[max(0, at - 10) : at + length]
    return repr(piece) + ("…" if at + length < len(text) else "")
