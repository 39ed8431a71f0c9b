"""The text of single tokens, for people who look at ids."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from stepgym.errors import UserError
from stepgym.inspect.recorded_run import RecordedRun

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenTexts:
    """Texts of a tokenizer's tokens, one by one.

    Args:
        folder: A folder with a tokenizer, or a hub name.

    Raises `UserError` where there is none. A folder with `tokenizer.json` is read without `transformers`, which takes
    seconds to import.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.source = str(folder)
        self._tokenizer = _load(folder)
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """The token's text. Part of a character is shown as its bytes (`\\xe2\\x80`), an id without a token as `?`."""
        if token not in self._known:
            self._known[token] = self._text(token)
        return self._known[token]

    def _text(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return "?"
        byte = _BYTE.fullmatch(name)
        if byte:
            value = int(byte[1], 16)
            return chr(value) if value < 0x80 else f"\\x{value:02x}"
        if name.startswith(_SPACE):  # decoding alone would take the space away
            return str(name.replace(_SPACE, " "))
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        if "\ufffd" in text or not text:
            values = [_byte_of().get(character) for character in name]
            if all(value is not None for value in values):
                return "".join(f"\\x{value:02x}" for value in values)
        return text or name


def find_token_texts(run: RecordedRun, given: str | None = None) -> TokenTexts | None:
    """The tokenizer of a run: the one that is given, the one kept with the run, a checkpoint's, or the model's folder.

    None where there is none. Raises `UserError` for one that is given and cannot be read.
    """
    if given is not None:
        return TokenTexts(given)
    places = [run.path / "renderer", *sorted((run.path / "checkpoints").glob("update-*/model"), reverse=True)]
    named = run.section("model").get("path")
    if isinstance(named, str):
        places.append(Path(named))
    for place in places:
        if (place / "tokenizer.json").exists() or (place / "tokenizer_config.json").exists():
            return TokenTexts(place)
    return None


class _Slow:
    """A tokenizer of `transformers`, with the two methods that are needed here."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def id_to_token(self, token: int) -> str | None:
        try:
            found = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, OverflowError):
            return None
        return found if isinstance(found, str) else None

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _load(folder: str | os.PathLike[str]) -> Any:
    path = Path(folder).expanduser()
    try:
        if (path / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path / "tokenizer.json"))
        if str(folder).startswith(("/", ".", "~")) and not path.is_dir():
            raise UserError(f"{folder}: there is no such folder with a tokenizer")
        from transformers import AutoTokenizer

        return _Slow(AutoTokenizer.from_pretrained(str(path if path.is_dir() else folder)))
    except UserError:
        raise
    except Exception as error:  # each library has its own for a file that is broken
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{folder}: the tokenizer cannot be loaded: {reason}") from None


@cache
def _byte_of() -> dict[str, int]:
    """Each character that byte-level tokenizers write for a byte; the printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = (value for value in range(0x100) if value not in printable)
    return table | {chr(0x100 + place): value for place, value in enumerate(others)}
