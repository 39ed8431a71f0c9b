"""What the outermost ORDER BY of a query orders by, so that ties in it can be told from order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from stepgym_sql.pool import QueryResult, Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ordering:
    """The ORDER BY of an outermost query.

    Attributes:
        columns: For each term the output column it names, or None where it is something else.
        ignore_case: For each term whether it compares text without regard to case (COLLATE NOCASE).
        extended_sql: The query with the other terms appended as output columns, or None where that is not possible.
    """

    columns: tuple[int | None, ...]
    ignore_case: tuple[bool, ...]
    extended_sql: str | None


def find_ordering(sql: str, columns: Sequence[str]) -> Ordering | None:
    """The ordering of a query whose result has these column names; None where its outermost query does not order.

    Also None, and logged, where the query cannot be parsed: its rows are then compared as a multiset.
    """
    try:
        query = sqlglot.parse_one(sql, dialect="sqlite")
    except sqlglot.errors.SqlglotError as error:
        logger.debug("compared without regard to order, since the query cannot be parsed: %s", error)
        return None
    if not isinstance(query, exp.Query):
        return None
    order = query.args.get("order")
    if order is None:
        return None
    terms, cases = [], []
    for ordered in order.expressions:
        term = ordered.this if isinstance(ordered, exp.Ordered) else ordered
        ignore_case = False
        while isinstance(term, exp.Collate | exp.Paren):
            if isinstance(term, exp.Collate):
                ignore_case = ignore_case or term.expression.name.upper() == "NOCASE"
            term = term.this
        terms.append(term)
        cases.append(ignore_case)
    found = tuple(_output_column(term, query, columns) for term in terms)
    missing = [term for term, column in zip(terms, found, strict=True) if column is None]
    extended = None
    if missing and isinstance(query, exp.Select) and not query.args.get("distinct"):
        extended = query.select(*(term.copy() for term in missing)).sql(dialect="sqlite")
    return Ordering(found, tuple(cases), extended)


def order_keys(ordering: Ordering, result: QueryResult, run: Callable[[str], QueryResult]) -> list[Row] | None:
    """The values of the ORDER BY terms for each row of the gold result.

    Args:
        ordering: Of the gold query.
        result: Of the gold query.
        run: Runs a query on the same database, for terms that are not among the output columns.

    Returns:
        One tuple per row, or None where the keys cannot be had (SELECT DISTINCT ordered by something it does not
        return): then the order is not well defined, and the rows are compared as a multiset.
    """
    rows, width = result.rows, len(result.columns)
    if None in ordering.columns:
        if ordering.extended_sql is None:
            return None
        extended = run(ordering.extended_sql)
        if extended.error is not None or [row[:width] for row in extended.rows] != list(rows):
            return None
        rows = extended.rows
    position = width
    positions = []
    for column in ordering.columns:
        positions.append(position if column is None else column)
        position += column is None
    keys = []
    for row in rows:
        values = (row[position] for position in positions)
        keys.append(
            tuple(
                value.lower() if ignore_case and isinstance(value, str) else value
                for value, ignore_case in zip(values, ordering.ignore_case, strict=True)
            )
        )
    return keys


def _output_column(term: exp.Expression, query: exp.Query, columns: Sequence[str]) -> int | None:
    """The output column that a term stands for, by number, by name or by being the same expression."""
    if isinstance(term, exp.Literal) and not term.is_string:
        number = int(term.this) if term.this.isdigit() else 0
        return number - 1 if 1 <= number <= len(columns) else None
    outputs = query.selects
    if len(outputs) == len(columns):
        for index, output in enumerate(outputs):
            if output.unalias() == term and not isinstance(output, exp.Star):
                return index
    if isinstance(term, exp.Column):
        named = [index for index, name in enumerate(columns) if name.lower() == term.name.lower()]
        # A qualified name (t.price) need not be the output column of that name (SELECT 2 * price AS price).
        if len(named) == 1 and (not term.table or any(isinstance(output, exp.Star) for output in outputs)):
            return named[0]
    return None
