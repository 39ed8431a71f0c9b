"""Reads facts back from the text of articles, and answers back from questions: the proof of the golden answers.

Nothing here looks at what an encyclopedia was made from. Sentences and questions are taken apart by the wordings of the
relations alone, and a sentence that cannot be understood is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from stepgym.errors import UserError
from stepgym_search.document import Document
from stepgym_search.encyclopedia.article import ALIAS_FORMS, COPULAS, FILLERS, MENTIONS, PRONOUNS
from stepgym_search.encyclopedia.categories import CATEGORIES, NOUNS, PLAIN_NOUNS, Category
from stepgym_search.encyclopedia.dates import read_day, spellings
from stepgym_search.encyclopedia.relations import COMPARISONS, RELATIONS, UNKNOWN, UNKNOWN_RULE, Relation


@dataclass(frozen=True, slots=True)
class Reading:
    """What an article says.

    Attributes:
        name: Its title.
        category: The class of what it is about.
        alias: The other name that it gives.
        facts: By name of the relation, the objects as they are written; more than one would be a contradiction.
    """

    name: str
    category: Category
    alias: str | None
    facts: dict[str, list[str]] = field(default_factory=dict)


def read_article(document: Document) -> Reading:
    """Take an article apart. Raises `UserError` for a sentence that is none of an encyclopedia's, or could be two."""
    name = document.title.strip('"')
    first, *others = re.findall(r"[^.]+(?=\.)", document.text)
    reading = _read_first(name, first)
    for sentence in others:
        _read_next(reading, sentence.strip())
    return reading


def read_answers(question: str, documents: Iterable[Document]) -> list[str]:
    """All answers that articles give to a question, under every name and in every spelling; they are golden.

    Args:
        question: As the generator words it.
        documents: The articles to be read; more than are needed do no harm.

    Returns:
        The golden answers. `UNKNOWN` where the articles do not tell and the question allows for that.

    Raises:
        UserError: The articles contradict each other, or do not tell although the question expects them to; or the
            question can be taken in no way or in two.
    """
    readings: dict[str, Reading] = {}
    names: dict[str, str] = {}
    for reading in map(read_article, documents):
        readings[reading.name] = reading
        for name in filter(None, (reading.name, reading.alias)):
            if name in names:
                raise UserError(f"search: two articles are called {name!r}")
            names[name] = reading.name
    asked = question.removesuffix(UNKNOWN_RULE)
    ways = {*_ask_one(asked, names), *_ask_two(asked, names)}
    if len(ways) != 1:
        raise UserError(f"search: {question!r} can be taken in {len(ways)} ways")
    starts, chain, later = ways.pop()
    said: str | None
    if len(starts) == 1:
        said = starts[0]
        for relation in chain:
            said = _fact(readings, said, relation) if said is not None else None
    else:
        days = {read_day(_fact(readings, start, chain[0]) or ""): start for start in starts}
        if None in days or len(days) < 2:
            raise UserError(f"search: the articles do not tell which comes first: {question!r}")
        said = days[(max if later else min)(day for day in days if day is not None)]
    if said is None:
        if question == asked:
            raise UserError(f"search: the articles do not answer {question!r}")
        return list(UNKNOWN)
    if len(starts) == 1 and chain[-1].object == "date":
        day = read_day(said)
        if day is None:
            raise UserError(f"search: {said!r} is not a day")
        return spellings(day)
    return [said, *(alias for alias, name in names.items() if name == said and alias != said)]


def _fact(readings: dict[str, Reading], name: str, relation: Relation) -> str | None:
    objects = readings[name].facts.get(relation.name, []) if name in readings else []
    if len(objects) > 1:
        raise UserError(f"search: the article about {name} contradicts itself: {relation.name} is {objects}")
    return objects[0] if objects else None


def _read_first(name: str, sentence: str) -> Reading:
    """The first sentence: the name, perhaps another, what it is, and facts."""
    rest = sentence.removeprefix(name)
    for category in CATEGORIES:
        match = _introduction(category).fullmatch(rest)
        if match is None or rest == sentence:
            continue
        groups = match.groupdict()
        facts = (groups.pop("facts") or "").strip()
        reading = Reading(name, category, next(filter(None, groups.values()), None))
        for part in facts.split(" and "):
            if part:
                _add(reading, part, {(r, m["o"]) for r, p in _participles(category) if (m := p.fullmatch(part))})
        return reading
    raise UserError(f"search: cannot be read: {sentence!r}")


def _read_next(reading: Reading, sentence: str) -> None:
    name, category = reading.name, reading.category
    if any(sentence + "." == form.format(s=name) for form in FILLERS):
        return
    if any(_pattern(form).fullmatch(sentence + ".") for form in MENTIONS):
        return
    found = set()
    for relation, pattern in _statements(category):
        match = pattern.fullmatch(sentence)
        if match is not None and match["s"] == name:
            found.add((relation, match["o"]))
    if found:
        return _add(reading, sentence, found)
    subjects = [name, PRONOUNS[category], *(f"The {noun}" for noun in (*NOUNS[category], PLAIN_NOUNS[category]))]
    subject = max((s for s in subjects if sentence.startswith(s + " ")), key=len, default="")
    for part in sentence.removeprefix(subject).strip().split(" and "):
        _add(reading, part, {(r, m["o"]) for r, p in _predicates(category) if (m := p.fullmatch(part))})


def _add(reading: Reading, text: str, found: set[tuple[str, str]]) -> None:
    if len(found) != 1:
        raise UserError(f"search: in the article about {reading.name}, {text!r} can be read in {len(found)} ways")
    relation, value = found.pop()
    values = reading.facts.setdefault(relation, [])
    if value not in values:
        values.append(value)


_Way = tuple[tuple[str, ...], tuple[Relation, ...], bool]


def _ask_one(question: str, names: dict[str, str]) -> Iterator[_Way]:
    """The ways to take a question as one about one thing: where it starts and the relations to follow."""
    for relation in RELATIONS.values():
        for form in relation.questions:
            match = _pattern(form).fullmatch(question)
            if match is not None:
                yield from ((start, (*chain, relation), False) for start, chain in _refer(match["x"], names))


def _refer(phrase: str, names: dict[str, str]) -> Iterator[tuple[tuple[str], tuple[Relation, ...]]]:
    if phrase in names:
        yield (names[phrase],), ()
    for relation in RELATIONS.values():
        for form in relation.phrases:
            match = _pattern(form).fullmatch(phrase)
            if match is not None:
                yield from ((start, (*chain, relation)) for start, chain in _refer(match["x"], names))


def _ask_two(question: str, names: dict[str, str]) -> Iterator[_Way]:
    """The ways to take a question as one that compares two things."""
    for comparison in COMPARISONS:
        for later, forms in ((False, comparison.earlier), (True, comparison.later)):
            for form in forms:
                match = _pattern(form).fullmatch(question)
                if match is not None and match["a"] in names and match["b"] in names:
                    yield (names[match["a"]], names[match["b"]]), (RELATIONS[comparison.relation],), later


@cache
def _pattern(form: str) -> re.Pattern[str]:
    """What a wording matches, with a group for each of its places."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(form)))


@cache
def _introduction(category: Category) -> re.Pattern[str]:
    """What follows the name in a first sentence: perhaps another name, what it is, and facts."""
    aliases = "|".join(
        re.escape(form.removeprefix("{s}")).replace(r"\{alias\}", f"(?P<alias{number}>[^,()]+)")
        for number, form in enumerate(ALIAS_FORMS)
    )
    nouns = "|".join(sorted({*NOUNS[category], PLAIN_NOUNS[category]}, key=len, reverse=True))
    return re.compile(rf"(?:{aliases})? {COPULAS[category]} an? (?:{nouns})(?P<facts> .+)?")


@cache
def _participles(category: Category) -> list[tuple[str, re.Pattern[str]]]:
    return [(r.name, _pattern(r.participle)) for r in RELATIONS.values() if r.subject == category]


@cache
def _predicates(category: Category) -> list[tuple[str, re.Pattern[str]]]:
    return [
        (relation.name, _pattern(form))
        for relation in RELATIONS.values()
        if relation.subject == category
        for form in (f"{relation.auxiliary} {relation.participle}", *relation.predicates)
    ]


@cache
def _statements(category: Category) -> list[tuple[str, re.Pattern[str]]]:
    relations = [relation for relation in RELATIONS.values() if relation.subject == category]
    return [(relation.name, _pattern(form)) for relation in relations for form in relation.statements]
