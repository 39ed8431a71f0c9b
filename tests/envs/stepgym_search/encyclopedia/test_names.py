from __future__ import annotations

import re
from itertools import islice

import pytest
from stepgym_search.encyclopedia.categories import CATEGORIES, EPITHETS, NOUNS, PLAIN_NOUNS, SLOTS, WORLD_SIZE
from stepgym_search.encyclopedia.config import LARGEST, EncyclopediaConfig
from stepgym_search.encyclopedia.names import (
    FULL_ALIASES,
    FULL_SPACES,
    SHORT_ALIASES,
    SHORT_SPACES,
    SYLLABLES,
    TITLES,
    Names,
    NameStyle,
)
from stepgym_search.encyclopedia.world import World

STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was
will with
"""
"""What Lucene's English analysis leaves out of articles and queries."""


def every_name(config: EncyclopediaConfig) -> list[str]:
    """All names and other names of an encyclopedia."""
    names = []
    for index in range(config.worlds):
        for entity in World(config, index).entities:
            names += [entity.name] if entity.alias is None else [entity.name, entity.alias]
    return names


@pytest.mark.parametrize("homonyms", [False, True])
@pytest.mark.parametrize("style", ["full", "short"])
def test_no_name_comes_twice_in_two_hundred_thousand_articles(style: NameStyle, homonyms: bool) -> None:
    book = Names(3, style, homonyms)
    worlds = 200_000 // WORLD_SIZE
    seen: set[str] = set()
    for category, slots in SLOTS.items():
        for world in range(worlds):
            for place, slot in enumerate(slots):
                seen.add(book.name(category, world * len(slots) + place, world * WORLD_SIZE + slot))
    assert len(seen) == 200_000
    aliases = {book.alias(number) for number in range(0, 200_000, 5)}
    assert len(aliases) == 40_000
    assert not aliases & seen


@pytest.mark.parametrize("homonyms", [False, True])
def test_the_last_names_of_the_largest_encyclopedia_differ_from_the_first(homonyms: bool) -> None:
    book = Names(0, "short", homonyms)
    numbers = [*range(5_000), *range(SHORT_SPACES[0].size - 5_000, SHORT_SPACES[0].size + 5_000)]
    numbers += range(LARGEST - 5_000, LARGEST)
    assert len({book.name("work", 0, number) for number in numbers}) == len(numbers)


def test_there_are_names_enough_for_a_million_articles() -> None:
    worlds = LARGEST // WORLD_SIZE
    assert all(FULL_SPACES[category].size >= worlds * len(SLOTS[category]) for category in CATEGORIES)
    assert sum(space.size for space in SHORT_SPACES) >= LARGEST
    assert min(FULL_ALIASES.size, SHORT_ALIASES.size) >= LARGEST


def test_full_names_use_some_tens_of_thousands_of_words() -> None:
    parts = [part for space in (*FULL_SPACES.values(), FULL_ALIASES) for part in space.parts]
    assert sum(part.size for part in parts) < 60_000


def test_every_name_of_a_class_has_the_same_number_of_syllables() -> None:
    config = EncyclopediaConfig(articles=2000, aliases=False)
    words: dict[str, set[tuple[int, ...]]] = {}
    for index in range(config.worlds):
        for entity in World(config, index).entities:
            if entity.category in ("person", "town"):
                counts = tuple(len(re.findall("[aeiou]", word)) for word in entity.name.split())
                words.setdefault(entity.category, set()).add(counts)
    assert words == {"person": {(2, 2)}, "town": {(1, 3)}}
    assert {len(name) for name in every_name(EncyclopediaConfig(names="short", aliases=False))} == {6}


def test_homonyms_share_a_family_name_or_all_but_the_last_part() -> None:
    world = World(EncyclopediaConfig(distractors=2), 4)
    people = [entity.name.split() for entity in world.of("person")]
    assert all(one[1] == other[1] and one[0] != other[0] for one, other in zip(people[::2], people[1::2], strict=True))
    assert len({family for _, family in people}) == 3
    short = [entity.name for entity in World(EncyclopediaConfig(distractors=2, names="short"), 4).of("town")]
    assert all(one[:-3] == other[:-3] for one, other in zip(short[::2], short[1::2], strict=True))
    families = [entity.name.split()[1] for entity in World(EncyclopediaConfig(distractors=1), 4).of("person")]
    assert len(set(families)) == 6


def test_names_differ_between_seeds_and_so_do_their_words() -> None:
    one, other = (set(every_name(EncyclopediaConfig(seed=seed, articles=400))) for seed in (1, 2))
    assert not one & other
    firsts = {Names(seed, "full", False).name("town", number, 0).split()[0] for seed in (1, 2) for number in range(400)}
    assert len(firsts) > 1.25 * FULL_SPACES["town"].parts[-1].count


def test_no_word_of_a_name_is_one_that_searches_leave_out() -> None:
    frames = {word.lower() for title in TITLES for word in title.split()}
    for style in ("full", "short"):
        for name in every_name(EncyclopediaConfig(articles=10_000, names=style, wording="plain")):
            assert not (set(name.lower().split()) - frames) & set(STOP_WORDS.split()), name


def test_the_tables_of_words_have_no_word_twice() -> None:
    assert len(set(SYLLABLES)) == len(SYLLABLES) == 64
    assert all(re.fullmatch("[bdfghklmnprstvz][aeiou]", syllable) for syllable in SYLLABLES)
    assert len(set(TITLES)) == len(TITLES)
    nouns = [noun for category in CATEGORIES for noun in {*NOUNS[category], PLAIN_NOUNS[category]}]
    assert len(nouns) == len(set(nouns))
    epithets = [word for words in EPITHETS.values() for word in words]
    assert len(epithets) == len(set(epithets))
    assert all(len(EPITHETS[category]) == len(SLOTS[category]) for category in CATEGORIES)


def test_names_are_capitalised_and_hold_only_letters() -> None:
    for name in islice(every_name(EncyclopediaConfig()), 2_000):
        assert re.fullmatch(r"(the )?[A-Z][a-z]*( (of|to|in|at|from|over|for|[A-Z][a-z]+))*", name), name
