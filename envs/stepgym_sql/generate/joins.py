"""The kinds of questions over two tables. A `child` is a table that refers to a `parent`."""

from __future__ import annotations

from dataclasses import dataclass

from stepgym_sql.generate.drawing import Draw, column_slot, pick, say, value_slot
from stepgym_sql.generate.plan import Plan, quote
from stepgym_sql.generate.world import StoredColumn, StoredTable, World


@dataclass(frozen=True, slots=True)
class _Link:
    child: StoredTable
    reference: StoredColumn
    parent: StoredTable
    label: StoredColumn

    @property
    def clause(self) -> str:
        """FROM and JOIN, with the child as `c` and the parent as `p`."""
        return (
            f"FROM {self.child.name} AS c JOIN {self.parent.name} AS p "
            f"ON c.{self.reference.name} = p.{self.parent.id_name}"
        )


def _links(world: World) -> list[_Link]:
    links = []
    for child in world.tables:
        for reference in child.of_kind("reference"):
            parent = world.table(reference.column.target)
            if parent is not None and parent.label is not None:
                links.append(_Link(child, reference, parent, parent.label))
    return links


def join_lookup(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """One column of the children of a parent that is named."""
    link = pick(draw, _links(world))
    if link is None:
        return None
    column = pick(draw, [c for c in link.child.of_kind("integer", "real", "label") if not c.column.nulls])
    parents = [value for value in link.reference.values if value is not None]
    if column is None or not parents:
        return None
    name = str(link.label.values[link.parent.ids.index(int(draw.choice(parents)))])
    one, parent, what = link.child.table.word, link.parent.table.word, column.column.word
    question = say(
        draw,
        paraphrase,
        f"List the {what} of every {one} of the {parent} {name}.",
        f"The {parent} {name} has which {link.child.table.plural}? Give the {what} of each, one row per {one}.",
    )
    sql = f"SELECT {{column}} {link.clause} WHERE p.{link.label.name} = {quote(name)}"
    return Plan(question, sql, column_slot(link.child, column, "c."))


def join_filter(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The parents with a child of some category, each once."""
    link = pick(draw, [link for link in _links(world) if link.child.of_kind("category")])
    if link is None:
        return None
    category = draw.choice(link.child.of_kind("category"))
    word = draw.choice(list(category.spelled))
    one, parent = link.child.table.word, link.parent.table.word
    question = say(
        draw,
        paraphrase,
        f"List the {link.label.column.word} of every {parent} that has at least one {one} whose "
        f"{category.column.word} is {word}; each {parent} once.",
        f"Which {link.parent.table.plural} have a {one} with the {category.column.word} {word}? "
        f"Give each {link.label.column.word} once.",
    )
    sql = f"SELECT DISTINCT p.{link.label.name} {link.clause} WHERE c.{category.name} = {{value}}"
    return Plan(question, sql, value_slot(link.child, category, word))


def join_group(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The number of children of every parent, those without any included."""
    link = pick(draw, _links(world))
    if link is None:
        return None
    what, parent, many = link.label.column.word, link.parent.table.word, link.child.table.plural
    question = say(
        draw,
        paraphrase,
        f"For every {parent}, give its {what} and its number of {many}, 0 if it has none.",
        f"How many {many} does each {parent} have? Give the {what}, then the number, also for those with none.",
    )
    sql = (
        f"SELECT p.{link.label.name}, count(c.{link.child.id_name}) FROM {link.parent.name} AS p "
        f"LEFT JOIN {link.child.name} AS c ON c.{link.reference.name} = p.{link.parent.id_name} "
        f"GROUP BY p.{link.parent.id_name}"
    )
    return Plan(question, sql)


def join_total(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The parents that have children, ordered by a total over them."""
    link = pick(draw, _links(world))
    column = pick(draw, [c for c in link.child.of_kind("integer", "real") if not c.column.nulls]) if link else None
    if link is None or column is None:
        return None
    what, parent, many = link.label.column.word, link.parent.table.word, link.child.table.plural
    question = say(
        draw,
        paraphrase,
        f"For each {parent} that has {many}, give the {what} and the total {column.column.word} of its {many}, "
        f"highest total first.",
        f"Rank the {link.parent.table.plural} that have {many} by the total {column.column.word} of their {many}, "
        f"highest first: {what}, then total.",
    )
    sql = (
        f"SELECT p.{link.label.name}, sum({{column}}) {link.clause} "
        f"GROUP BY p.{link.parent.id_name} ORDER BY sum({{column}}) DESC"
    )
    return Plan(question, sql, column_slot(link.child, column, "c."))


def without(world: World, draw: Draw, paraphrase: bool) -> Plan | None:
    """The parents that have no child."""
    link = pick(draw, _links(world))
    if link is None:
        return None
    what, parent, one = link.label.column.word, link.parent.table.word, link.child.table.word
    question = say(
        draw,
        paraphrase,
        f"List the {what} of every {parent} that has no {one}.",
        f"Which {link.parent.table.plural} have no {one} at all? Give the {what}.",
    )
    sql = (
        f"SELECT {link.label.name} FROM {link.parent.name} WHERE {link.parent.id_name} NOT IN "
        f"(SELECT {link.reference.name} FROM {link.child.name} WHERE {link.reference.name} IS NOT NULL)"
    )
    return Plan(question, sql)
