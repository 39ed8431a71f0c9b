"""The text of an article: a title, and sentences that state the facts."""

from __future__ import annotations

from collections.abc import Sequence

from stepgym_search.document import Document
from stepgym_search.encyclopedia.categories import WORLD_SIZE, Category
from stepgym_search.encyclopedia.draws import Stream
from stepgym_search.encyclopedia.relations import Relation
from stepgym_search.encyclopedia.world import Entity, World

ALIAS_FORMS = ("{s}, also called {alias},", "{s} (also known as {alias})")
"""How the first sentence gives the other name."""

COPULAS: dict[Category, str] = {"person": "was", "town": "is", "region": "is", "organisation": "is", "work": "is"}

PRONOUNS: dict[Category, str] = {
    "person": "This person",
    "town": "It",
    "region": "It",
    "organisation": "It",
    "work": "It",
}

FILLERS = (
    "Little else is recorded about {s}.",
    "No picture of {s} has survived.",
    "Several letters about {s} were lost in a fire.",
    "Scholars still argue about {s}.",
    "An early account of {s} is full of errors.",
    "A small exhibition once honoured {s}.",
    "Old maps and registers rarely leave out {s}.",
    "Many stories about {s} are plainly invented.",
)
"""Sentences that tell nothing."""

MENTIONS = (
    "{s} is sometimes confused with {other}.",
    "A letter about {other} mentions {s} in passing.",
    "In old catalogues {s} stands next to {other}.",
    "The same rumour was spread about {s} and about {other}.",
)
"""Sentences that name another entity and tell nothing."""


def write_article(world: World, slot: int) -> Document:
    """The article about an entity of a world, as the corpus has it."""
    config = world.config
    entity = world.entities[slot]
    draw = Stream(config.seed, "article", world.index * WORLD_SIZE + slot) if config.wording == "varied" else None
    relations: Sequence[Relation] = [r for r in config.stated[entity.category] if r.name in entity.facts]
    if draw is not None:
        relations = draw.shuffled(relations)
    groups = _spread(relations, config.sentences)
    sentences = [_first(entity, groups[0], draw), *(_next(entity, group, draw) for group in groups[1:])]
    for number in range(config.sentences - len(sentences)):
        filler = draw.below(len(FILLERS)) if draw is not None else int(entity.id)
        sentences.append(FILLERS[(filler + number) % len(FILLERS)].format(s=entity.name))
    if config.distractors >= 3:
        mention = Stream(config.seed, "mention", entity.id)
        other = mention.pick([other for other in world.entities if other is not entity])
        form = MENTIONS[0] if draw is None else mention.pick(MENTIONS)
        sentences.append(form.format(s=entity.name, other=other.name))
    text = " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
    return Document(entity.id, f'"{entity.name}"\n{text}')


def _spread(relations: Sequence[Relation], sentences: int) -> list[Sequence[Relation]]:
    """The relations in order, one or two for each sentence; the first sentence may have none."""
    count = max(1, min(sentences, len(relations)))
    pairs = len(relations) - count
    groups, start = [], 0
    for number in range(count):
        end = start + (2 if number < pairs else 1)
        groups.append(relations[start:end])
        start = end
    return groups


def _first(entity: Entity, relations: Sequence[Relation], draw: Stream | None) -> str:
    subject = entity.name
    if entity.alias is not None:
        form = ALIAS_FORMS[0] if draw is None else draw.pick(ALIAS_FORMS)
        subject = form.format(s=entity.name, alias=entity.alias)
    article = "an" if entity.noun[0] in "aeiou" else "a"
    facts = " and ".join(relation.participle.format(o=entity.spell(relation)) for relation in relations)
    return f"{subject} {COPULAS[entity.category]} {article} {entity.noun} {facts}".rstrip() + "."


def _next(entity: Entity, relations: Sequence[Relation], draw: Stream | None) -> str:
    if draw is None:
        return f"{entity.name} {' and '.join(_predicate(entity, relation, None) for relation in relations)}."
    if len(relations) == 1 and draw.below(2):
        relation = relations[0]
        return draw.pick(relation.statements).format(s=entity.name, o=entity.spell(relation)) + "."
    subject = draw.pick((entity.name, PRONOUNS[entity.category], f"The {entity.noun}"))
    return f"{subject} {' and '.join(_predicate(entity, relation, draw) for relation in relations)}."


def _predicate(entity: Entity, relation: Relation, draw: Stream | None) -> str:
    usual = f"{relation.auxiliary} {relation.participle}"
    form = usual if draw is None else draw.pick((usual, *relation.predicates))
    return form.format(o=entity.spell(relation))
