"""The kinds of questions over one table.

Each draws a question from a world, or None where the world does not have what it takes.

A question speaks of tables, columns and categories by their plain words. What the answer's columns are, and in which
order, is always said. Whether the answer is unambiguous is checked afterwards, on the rows (see `tasks`).
"""

from __future__ import annotations

from collections import Counter

from stepgym_sql.generate.drawing import (
    Draw,
    column_slot,
    direction,
    lookalikes,
    nullable,
    pick,
    say,
    value_slot,
    with_category,
)
from stepgym_sql.generate.plan import Plan, quote
from stepgym_sql.generate.world import World


def lookup(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """One value of one row, found by its name."""
    table = pick(draw, [table for table in world.tables if table.label])
    label = table.label if table else None
    if table is None or label is None:
        return None
    column = pick(draw, table.of_kind("integer", "real", "date", "text"))
    if column is None:
        return None
    row = draw.choice([index for index, value in enumerate(column.values) if value is not None] or [0])
    name, what, one = str(label.values[row]), column.column.word, table.table.word
    question = say(
        draw,
        paraphrase,
        f"What is the {what} of the {one} {name}?",
        f"Give the {what} of the {one} whose {label.column.word} is {name}.",
    )
    slots = column_slot(table, column)
    return Plan(question, f"SELECT {{column}} FROM {table.name} WHERE {label.name} = {quote(name)}", slots)


def count(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """How many rows are of a category."""
    found = with_category(world, draw)
    if found is None:
        return None
    table, category, word = found
    many, what = table.table.plural, category.column.word
    question = say(
        draw,
        paraphrase,
        f"How many {many} have the {what} {word}?",
        f"Count the {many} whose {what} is {word}.",
    )
    sql = f"SELECT count(*) FROM {table.name} WHERE {category.name} = {{value}}"
    return Plan(question, sql, value_slot(table, category, word))


def filtered(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """One column of the rows of a category."""
    found = with_category(world, draw)
    if found is None:
        return None
    table, category, word = found
    columns = [c for c in table.of_kind("label", "integer", "real") if not c.column.nulls]
    # A column that can be mistaken for another asks more of whoever answers.
    column = pick(draw, [c for c in columns if lookalikes(table, c)] or columns)
    if column is None:
        return None
    one, many = table.table.word, table.table.plural
    question = say(
        draw,
        paraphrase,
        f"List the {column.column.word} of every {one} whose {category.column.word} is {word}.",
        f"Which {column.column.word} does each {one} with the {category.column.word} {word} have? One row per {one}.",
        f"For all {many} with {category.column.word} {word}, list the {column.column.word}.",
    )
    sql = f"SELECT {{column}} FROM {table.name} WHERE {category.name} = {{value}}"
    return Plan(question, sql, column_slot(table, column) | value_slot(table, category, word))


def compare(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The names of rows above or below a bound."""
    table = pick(draw, [table for table in world.tables if table.label and table.of_kind("integer", "real")])
    column = pick(draw, table.of_kind("integer", "real")) if table else None
    label = table.label if table else None
    if table is None or column is None or label is None:
        return None
    known = sorted(value for value in column.values if isinstance(value, int | float))
    if len(known) < 4:
        return None
    bound = int(known[draw.randint(1, len(known) - 2)])
    sign, than = draw.choice(((">", "more than"), ("<", "less than")))
    question = say(
        draw,
        paraphrase,
        f"List the {label.column.word} of every {table.table.word} with a {column.column.word} of {than} {bound}.",
        f"Which {table.table.plural} have a {column.column.word} of {than} {bound}? Give the {label.column.word}.",
    )
    sql = f"SELECT {label.name} FROM {table.name} WHERE {{column}} {sign} {bound}"
    return Plan(question, sql, column_slot(table, column))


def aggregate(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """A total, average, highest or lowest number over a category."""
    found = with_category(world, draw)
    column = pick(draw, found[0].of_kind("integer", "real")) if found else None
    if found is None or column is None:
        return None
    table, category, word = found
    function, adjective = draw.choice((("sum", "total"), ("avg", "average"), ("max", "highest"), ("min", "lowest")))
    what, many = column.column.word, table.table.plural
    question = say(
        draw,
        paraphrase,
        f"What is the {adjective} {what} of {many} whose {category.column.word} is {word}?",
        f"Give the {adjective} {what} over all {many} with the {category.column.word} {word}.",
    )
    sql = f"SELECT {function}({{column}}) FROM {table.name} WHERE {category.name} = {{value}}"
    return Plan(question, sql, column_slot(table, column) | value_slot(table, category, word))


def group(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """A number for each category."""
    table = pick(draw, [table for table in world.tables if table.of_kind("category")])
    if table is None:
        return None
    category = draw.choice(table.of_kind("category"))
    column = pick(draw, [c for c in table.of_kind("integer", "real") if not c.column.nulls])
    what, many = category.column.word, table.table.plural
    if column is None or draw.random() < 0.4:
        question = say(
            draw,
            paraphrase,
            f"For each {what}, give the {what} and the number of {many}.",
            f"How many {many} are there per {what}? Return the {what}, then the number.",
        )
        return Plan(question, f"SELECT {category.name}, count(*) FROM {table.name} GROUP BY {category.name}")
    function, adjective = draw.choice((("sum", "total"), ("avg", "average"), ("max", "highest")))
    question = say(
        draw,
        paraphrase,
        f"For each {what} of {many}, give the {what} and the {adjective} {column.column.word}.",
        f"What is the {adjective} {column.column.word} of {many} per {what}? Return the {what}, then the number.",
    )
    sql = f"SELECT {category.name}, {function}({{column}}) FROM {table.name} GROUP BY {category.name}"
    return Plan(question, sql, column_slot(table, column))


def having(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The values that more than so many rows have."""
    table = pick(draw, [table for table in world.tables if table.of_kind("text", "category")])
    column = pick(draw, table.of_kind("text", "category")) if table else None
    if table is None or column is None:
        return None
    counts = sorted(Counter(value for value in column.values if value is not None).values())
    bound = draw.choice(counts) - 1 if counts else 0
    what, many = column.column.word, table.table.plural
    if bound < 1:
        return None
    question = say(
        draw,
        paraphrase,
        f"Which {what} do more than {bound} {many} have? List each {what} once; leave out missing ones.",
        f"List every {what} that is shared by more than {bound} {many}, not counting {many} without one.",
    )
    sql = (
        f"SELECT {column.name} FROM {table.name} WHERE {column.name} IS NOT NULL "
        f"GROUP BY {column.name} HAVING count(*) > {bound}"
    )
    return Plan(question, sql)


def order(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """All names, ordered by a number or a date."""
    table = pick(draw, [table for table in world.tables if table.label])
    label = table.label if table else None
    columns = table.of_kind("integer", "real", "date") if table else []
    column = pick(draw, [c for c in columns if not c.column.nulls])
    if table is None or label is None or column is None:
        return None
    way, words = direction(draw, column)
    question = say(
        draw,
        paraphrase,
        f"List the {label.column.word} of all {table.table.plural}, ordered by {column.column.word}, {words} first.",
        f"Sort all {table.table.plural} by {column.column.word}, {words} first, and give their {label.column.word}.",
    )
    return Plan(
        question, f"SELECT {label.name} FROM {table.name} ORDER BY {{column}} {way}", column_slot(table, column)
    )


def top(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The first few names by a number or a date."""
    table = pick(draw, [table for table in world.tables if table.label])
    label = table.label if table else None
    columns = table.of_kind("integer", "real", "date") if table else []
    column = pick(draw, [c for c in columns if not c.column.nulls])
    if table is None or label is None or column is None:
        return None
    way, words = direction(draw, column)
    number = draw.randint(1, 4)
    ordered = sorted(column.values, key=lambda value: (isinstance(value, str), value), reverse=way == "DESC")
    if number >= len(ordered) or len(set(ordered[: number + 1])) <= number:
        return None  # a tie at or before the end would leave open which rows are meant
    many = f"{number} {table.table.plural}" if number > 1 else table.table.word
    question = say(
        draw,
        paraphrase,
        f"Give the {label.column.word} of the {many} with the {words} {column.column.word}, {words} first.",
        f"By {column.column.word}, which {many} comes {words}? Give the {label.column.word}."
        if number == 1
        else f"Name ({label.column.word}) the {many} with the {words} {column.column.word}, starting with the {words}.",
    )
    sql = f"SELECT {label.name} FROM {table.name} ORDER BY {{column}} {way} LIMIT {number}"
    return Plan(question, sql, column_slot(table, column))


def nulls(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """How many, or which, rows lack a value."""
    table = pick(draw, [table for table in world.tables if nullable(table)])
    column = pick(draw, nullable(table)) if table else None
    if table is None or column is None:
        return None
    what, many = column.column.word, table.table.plural
    label = table.label
    if label is not None and draw.random() < 0.5:
        question = say(
            draw,
            paraphrase,
            f"List the {label.column.word} of every {table.table.word} whose {what} is missing.",
            f"Which {many} have no {what} on record? Give the {label.column.word}.",
        )
        return Plan(question, f"SELECT {label.name} FROM {table.name} WHERE {column.name} IS NULL")
    question = say(
        draw, paraphrase, f"How many {many} have no {what}?", f"Count the {many} for which no {what} is on record."
    )
    return Plan(question, f"SELECT count(*) FROM {table.name} WHERE {column.name} IS NULL")


def dates(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """How many rows fall in a year, after a day, or on which day the latest is."""
    table = pick(draw, [table for table in world.tables if table.of_kind("date")])
    column = pick(draw, table.of_kind("date")) if table else None
    known = sorted(str(value) for value in column.values if value is not None) if column else []
    if table is None or column is None or not known:
        return None
    many, what, day = table.table.plural, column.column.word, draw.choice(known)
    form = draw.randint(0, 2)
    if form == 0:
        year = day[:4]
        question = say(
            draw,
            paraphrase,
            f"How many {many} have a {what} in {year}?",
            f"Count the {many} whose {what} is in {year}.",
        )
        return Plan(question, f"SELECT count(*) FROM {table.name} WHERE {column.name} LIKE '{year}-%'")
    if form == 1 and day != known[-1]:
        question = say(
            draw,
            paraphrase,
            f"How many {many} have a {what} after {day}?",
            f"Count the {many} whose {what} is later than {day}.",
        )
        return Plan(question, f"SELECT count(*) FROM {table.name} WHERE {column.name} > '{day}'")
    question = say(
        draw,
        paraphrase,
        f"What is the latest {what} of the {many}?",
        f"On which day is the last {what} of any of the {many}?",
    )
    return Plan(question, f"SELECT max({column.name}) FROM {table.name}")


def distinct(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """Each value once, or how many different ones there are."""
    table = pick(draw, [table for table in world.tables if table.of_kind("text", "category")])
    column = pick(draw, table.of_kind("text", "category")) if table else None
    if table is None or column is None:
        return None
    what, many = column.column.word, table.table.plural
    if draw.random() < 0.5:
        question = say(
            draw,
            paraphrase,
            f"List every {what} that occurs among the {many}, each once; leave out missing ones.",
            f"Which different values does the {what} of {many} have? Leave out missing ones.",
        )
        return Plan(question, f"SELECT DISTINCT {column.name} FROM {table.name} WHERE {column.name} IS NOT NULL")
    question = say(
        draw,
        paraphrase,
        f"How many different values does the {what} of {many} have, missing ones not counted?",
        f"Count the distinct values of {what} among the {many}; missing ones do not count.",
    )
    return Plan(question, f"SELECT count(DISTINCT {column.name}) FROM {table.name}")


def duplicates(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The values that occur more than once, and how often."""
    table = pick(draw, [table for table in world.tables if table.of_kind("text", "category")])
    column = pick(draw, table.of_kind("text", "category")) if table else None
    if table is None or column is None:
        return None
    what, many = column.column.word, table.table.plural
    question = say(
        draw,
        paraphrase,
        f"Which {what} occurs more than once among the {many}? Give the {what} and how often; leave out missing ones.",
        f"List each repeated {what} of the {many} with the number of times it occurs, missing ones left out.",
    )
    sql = (
        f"SELECT {column.name}, count(*) FROM {table.name} WHERE {column.name} IS NOT NULL "
        f"GROUP BY {column.name} HAVING count(*) > 1"
    )
    return Plan(question, sql)


def above_average(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The names of the rows above the average."""
    table = pick(draw, [table for table in world.tables if table.label and table.of_kind("integer", "real")])
    column = pick(draw, table.of_kind("integer", "real")) if table else None
    label = table.label if table else None
    if table is None or column is None or label is None:
        return None
    question = say(
        draw,
        paraphrase,
        f"List the {label.column.word} of every {table.table.word} with {column.column.word} above average.",
        f"Which {table.table.plural} have a {column.column.word} above the average of all {table.table.plural}? "
        f"Give the {label.column.word}.",
    )
    sql = f"SELECT {label.name} FROM {table.name} WHERE {{column}} > (SELECT avg({{column}}) FROM {table.name})"
    return Plan(question, sql, column_slot(table, column))
