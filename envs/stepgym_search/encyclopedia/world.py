"""A small closed society: people, towns, regions, organisations and works, and what is true of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from stepgym_search.encyclopedia.categories import EPITHETS, NOUNS, PLAIN_NOUNS, SLOTS, WORLD_SIZE, Category
from stepgym_search.encyclopedia.config import EncyclopediaConfig
from stepgym_search.encyclopedia.dates import Day, draw_day, spellings
from stepgym_search.encyclopedia.draws import Stream
from stepgym_search.encyclopedia.names import Names
from stepgym_search.encyclopedia.relations import Relation


@dataclass(eq=False)
class Entity:
    """What an article is about.

    Attributes:
        slot: Its place in its world.
        number: Its number among all entities, and of the line of its article in the corpus, from 0.
        category: Its class.
        noun: What it is.
        names: Where its names come from.
        facts: What is true of it and stated in its article, by relation: another entity, or a day.
        date_form: In which of the spellings its article writes days.
        renamed: Whether it has another name.
        epithet_of: The place in a name of the form "the Fox of ..."; None where the other name is a word.
    """

    slot: int
    number: int
    category: Category
    noun: str
    names: Names
    facts: dict[str, Entity | Day] = field(default_factory=dict)
    date_form: int = 0
    renamed: bool = False
    epithet_of: Entity | None = None

    @property
    def id(self) -> str:
        """Of its article."""
        return str(self.number)

    @cached_property
    def name(self) -> str:
        """Unique in the encyclopedia."""
        slots, world = SLOTS[self.category], self.number // WORLD_SIZE
        return self.names.name(self.category, world * len(slots) + self.slot - slots.start, self.number)

    @cached_property
    def alias(self) -> str | None:
        """Its other name, unique too; None where it has only one."""
        if self.epithet_of is not None:
            # No two entities of a class have the same epithet, and no two classes share one.
            return f"the {EPITHETS[self.category][self.slot - SLOTS[self.category].start]} of {self.epithet_of.name}"
        return self.names.alias(self.number) if self.renamed else None

    def spell(self, relation: Relation) -> str:
        """The object of a relation as the article writes it."""
        value = self.facts[relation.name]
        return value.name if isinstance(value, Entity) else spellings(value)[self.date_form]


class World:
    """World `index` of an encyclopedia, made from the config's seed and the index alone.

    Every relation stays inside it, so what is true in it needs no other world to be known.
    """

    def __init__(self, config: EncyclopediaConfig, index: int) -> None:
        self.config = config
        self.index = index
        draw = Stream(config.seed, "entities", index)
        self.entities = [self._entity(category, slot, draw) for category, slots in SLOTS.items() for slot in slots]
        truth = _Society(Stream(config.seed, "world", index), self).facts
        gaps = self._gaps() if config.gaps else set()
        for slot, entity in enumerate(self.entities):
            for relation in config.stated[entity.category]:
                value = truth[slot].get(relation.name)
                if value is not None and (relation.name, slot) not in gaps:
                    entity.facts[relation.name] = value
        if config.aliases:
            self._name_again()

    def of(self, category: Category) -> list[Entity]:
        """The entities of a class."""
        slots = SLOTS[category]
        return self.entities[slots.start : slots.stop]

    def _entity(self, category: Category, slot: int, draw: Stream) -> Entity:
        number, names = self.index * WORLD_SIZE + slot, self.config.name_book
        if self.config.wording == "plain":
            return Entity(slot, number, category, PLAIN_NOUNS[category], names)
        return Entity(slot, number, category, draw.pick(NOUNS[category]), names, date_form=draw.below(2))

    def _gaps(self) -> set[tuple[str, int]]:
        """For each relation one entity whose article leaves it out; the two regions leave nothing out."""
        draw = Stream(self.config.seed, "gaps", self.index)
        gaps = set()
        for category, relations in self.config.stated.items():
            for relation in relations:
                slot = draw.pick(SLOTS[category])
                if relation.gaps and category != "region":
                    gaps.add((relation.name, slot))
        return gaps

    def _name_again(self) -> None:
        """Give about half of the entities another name; one "of" some place has nothing to do with that place."""
        draw = Stream(self.config.seed, "aliases", self.index)
        for entity in self.entities:
            choice = draw.below(4)
            entity.renamed = choice >= 2
            if choice == 3 and self.config.wording == "varied":
                places = self.of("town" if entity.category in ("town", "region") else "region")
                entity.epithet_of = draw.pick([place for place in places if place is not entity])


class _Society:
    """What is true in a world, stated or not, by slot and relation.

    Whatever is of the same class in one article differs, and so do the towns of a work or an organisation from those
    of the person it comes from: an answer taken from the wrong place is wrong. Days fit each other: organisations are
    founded while everybody lives, and works published once there are organisations to publish them.
    """

    def __init__(self, draw: Stream, world: World) -> None:
        self._draw = draw
        self.facts: list[dict[str, Entity | Day]] = [{} for _ in world.entities]
        self._world = world
        self._people()
        self._towns_and_regions()
        self._organisations()
        self._works()

    def _each(self, category: Category) -> Iterator[dict[str, Entity | Day]]:
        return iter([self.facts[slot] for slot in SLOTS[category]])

    def _two(self, category: Category, *taken: object) -> tuple[Entity, Entity]:
        """Two entities of a class, if possible neither of them taken."""
        every = self._world.of(category)
        free = [entity for entity in every if entity not in taken]
        first = self._draw.pick(free)
        others = [entity for entity in free if entity is not first]
        return first, self._draw.pick(others or [entity for entity in every if entity is not first])

    def _day(self, year: int, first: int, years: int) -> Day:
        """A day from `first` years after the year on, within so many years."""
        return draw_day(self._draw, year + first + self._draw.below(years))

    def _people(self) -> None:
        draw, people = self._draw, self._world.of("person")
        year = 1600 + draw.below(150)
        by_age = draw.shuffled(range(len(people)))
        for rank, slot in enumerate(by_age):
            facts = self.facts[slot]
            facts["birthplace"], facts["burial_place"] = self._two("town")
            born = self._day(year, rank * 5, 5)
            facts["birth_date"], facts["burial_date"] = born, self._day(born[0], 62, 30)
            if rank:
                # The oldest has no teacher in the encyclopedia; so nobody is their own teacher in a roundabout way.
                facts["teacher"] = people[by_age[rank - 1]]
            facts["spouse"] = people[by_age[(rank + 3) % len(people)]]
            facts["employer"], facts["school"] = self._two("organisation")

    def _towns_and_regions(self) -> None:
        regions, year = self._world.of("region"), 1200 + self._draw.below(100)
        towns = self._draw.shuffled(SLOTS["town"])
        for place, slot in enumerate(towns):
            facts, home = self.facts[slot], place // 2
            facts["region"], facts["claimant"] = regions[home], regions[1 - home]
            facts["governor"], facts["planner"] = self._two("person")
            chartered = self._day(year, place * 20, 19)
            facts["charter_date"], facts["siege_date"] = chartered, self._day(chartered[0], 20, 100)
        for home, facts in enumerate(self._each("region")):
            own = self._draw.shuffled(towns[2 * home : 2 * home + 2])
            facts["capital"], facts["former_capital"] = (self._world.entities[slot] for slot in own)
            facts["ruler"], facts["surveyor"] = self._two("person")

    def _organisations(self) -> None:
        founders = self._draw.shuffled(SLOTS["person"])
        year = self._last_birth() + 20
        ages = self._draw.shuffled(range(len(SLOTS["organisation"])))
        for age, founder, facts in zip(ages, founders, self._each("organisation"), strict=False):
            person = self._world.entities[founder]
            facts["founder"] = person
            facts["director"] = self._two("person", person)[0]
            life = self.facts[founder]
            facts["headquarters"], facts["branch"] = self._two("town", life["birthplace"], life["burial_place"])
            founded = self._day(year, age * 4, 4)
            facts["founding_date"], facts["reform_date"] = founded, self._day(founded[0], 10, 60)

    def _works(self) -> None:
        authors = self._draw.shuffled(SLOTS["person"])
        year = self._last_birth() + 32
        ages = self._draw.shuffled(range(len(SLOTS["work"])))
        for age, author, facts in zip(ages, authors, self._each("work"), strict=False):
            person = self._world.entities[author]
            facts["author"] = person
            facts["translator"] = self._two("person", person)[0]
            life = self.facts[author]
            facts["publication_place"], facts["setting"] = self._two("town", life["birthplace"], life["burial_place"])
            published = self._day(year, age * 3, 3)
            facts["publication_date"], facts["revision_date"] = published, self._day(published[0], 3, 20)
            facts["publisher"], facts["sponsor"] = self._two("organisation", life["employer"])

    def _last_birth(self) -> int:
        days = [facts["birth_date"] for facts in self._each("person")]
        return max(day[0] for day in days if isinstance(day, tuple))
