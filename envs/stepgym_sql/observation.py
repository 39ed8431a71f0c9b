"""What the agent sees: results as text tables, errors, and the wrapping of the SkyRL-SQL protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from stepgym_sql.pool import QueryResult, Row, Value

ObservationFormat: TypeAlias = Literal["skyrl", "brief"]

INVALID_ACTION = (
    "Your previous action is invalid. Think inside <think> and </think>, then either look at the database with "
    "<sql>your query</sql> or finish with <solution>your query</solution>."
)
INVALID_ACTION_BRIEF = "invalid: write <think></think>, then <sql></sql> or <solution></solution>"
INVALID_CALL = "Your previous turn called no tool. Call `sql` to look at the database, or `solution` to finish."
LOOKING_REFUSED = "Looking at the database is not allowed here: finish with your solution."

_SHOWN_BLOB_BYTES = 32
_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"} | {
    code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), 127)
}


def wrap(body: str, turns_left: int, observation_format: ObservationFormat) -> str:
    """A body in the tags of the protocol, with the reminder of the turns left.

    `skyrl` is the published wording to the letter; `brief` has the same tags with fewer words and no blank lines.
    """
    return (
        f"\n\n<observation>{body}\n{reminder(turns_left, observation_format)}</observation>\n\n"
        if observation_format == "skyrl"
        else f"<observation>{body}\n{reminder(turns_left, observation_format)}</observation>"
    )


def reminder(turns_left: int, observation_format: ObservationFormat) -> str:
    """The reminder of the turns left, in its tags."""
    if observation_format == "skyrl":
        return f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
    return f"<reminder>{turns_left} left</reminder>"


def result_text(result: QueryResult, *, shown_rows: int, max_chars: int, observation_format: ObservationFormat) -> str:
    """A result as text: its error, or a table under the names of its columns.

    A table of more than `max_chars` characters, or one whose reading stopped at a limit, is cut to `shown_rows` rows
    and says so; what is still longer (wide rows) is cut to `max_chars` characters and says so.
    """
    if result.error is not None:
        return f"Error executing SQL: {visible(result.error)}"
    text = table_text(result.columns, result.rows, observation_format)
    if result.more or len(text) > max_chars:
        shown = result.rows[:shown_rows]
        if result.more or len(shown) < len(result.rows):
            count = f"more than {len(result.rows)}" if result.more else str(len(result.rows))
            head = f"Truncated to {len(shown)} of {count} rows since the result is too long:\n"
            text = head + table_text(result.columns, shown, observation_format)
    if len(text) > max_chars:
        text = f"{text[:max_chars]}… (cut to {max_chars} of {len(text)} characters)"
    return text


def table_text(columns: Sequence[str], rows: Sequence[Row], observation_format: ObservationFormat) -> str:
    """A text table: right-aligned columns (`skyrl`), or cells with `|` between them and no padding (`brief`)."""
    cells = [[visible(name) for name in columns], *([cell_text(value) for value in row] for row in rows)]
    if observation_format == "brief":
        lines = ["|".join(row) for row in cells]
    else:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    if not rows:
        lines.append("(no rows)")
    return "\n".join(lines)


def cell_text(value: Value) -> str:
    """A cell as text: NULL for a NULL, hexadecimal for a blob, control characters escaped."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        more = "…" if len(value) > _SHOWN_BLOB_BYTES else ""
        return f"x'{value[:_SHOWN_BLOB_BYTES].hex()}{more}'"
    return visible(value) if isinstance(value, str) else repr(value)


def visible(text: str) -> str:
    """Text that prints on one line and encodes as UTF-8: bytes that were none are shown as U+FFFD."""
    return _SURROGATES.sub("\ufffd", text).translate(_ESCAPES)
