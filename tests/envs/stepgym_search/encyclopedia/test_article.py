from __future__ import annotations

import re
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.document import Document
from stepgym_search.encyclopedia import RELATIONS, EncyclopediaConfig, articles
from stepgym_search.encyclopedia.article import FILLERS, MENTIONS, write_article
from stepgym_search.encyclopedia.reader import read_article
from stepgym_search.encyclopedia.world import Entity, World

configs = st.builds(
    EncyclopediaConfig,
    seed=st.integers(-(2**40), 2**40),
    articles=st.just(1_000_000),
    wording=st.sampled_from(["plain", "varied"]),
    names=st.sampled_from(["full", "short"]),
    distractors=st.integers(0, 3),
    aliases=st.booleans(),
    sentences=st.integers(1, 8),
    gaps=st.booleans(),
)
"""Encyclopedias of every sort."""


def world_articles(world: World) -> list[Document]:
    return [write_article(world, slot) for slot in range(len(world.entities))]


@settings(max_examples=60, deadline=None)
@given(config=configs, index=st.integers(0, 49_999))
def test_articles_say_what_is_true_of_their_entity_and_nothing_else(config: EncyclopediaConfig, index: int) -> None:
    world = World(config, index)
    for entity, article in zip(world.entities, world_articles(world), strict=True):
        reading = read_article(article)
        said = {name: [entity.spell(RELATIONS[name])] for name in entity.facts}
        assert (reading.name, reading.category, reading.alias) == (entity.name, entity.category, entity.alias)
        assert reading.facts == said


@settings(max_examples=60, deadline=None)
@given(config=configs, index=st.integers(0, 49_999))
def test_articles_are_written_as_one_writes(config: EncyclopediaConfig, index: int) -> None:
    for article in world_articles(World(config, index)):
        title, text = article.contents.split("\n")
        assert re.fullmatch(r'"[A-Z][A-Za-z ]+"', title)
        assert not re.search(r"[{}<>_]|  | [.,)]|\( |\.\.", text)
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", text), text
        sentences = re.findall(r"[^.]+\.", text)
        assert len(sentences) == config.sentences + (config.distractors >= 3)
        assert all(re.match("[A-Z]", sentence.strip()) for sentence in sentences)
        assert text.endswith(".")


@settings(max_examples=60, deadline=None)
@given(config=configs, index=st.integers(0, 49_999))
def test_a_society_holds_together(config: EncyclopediaConfig, index: int) -> None:
    everything = EncyclopediaConfig(seed=config.seed, gaps=False, distractors=1)
    world = World(everything, index)

    def one(entity: Entity, relation: str) -> Any:
        return entity.facts[relation]

    for entity in world.entities:
        # Only the oldest person lacks anything: a teacher.
        lacking = {r.name for r in everything.stated[entity.category]} - set(entity.facts)
        assert lacking <= ({"teacher"} if entity.category == "person" else set())
        values = [value for value in entity.facts.values() if isinstance(value, Entity)]
        assert entity not in values
        assert all(RELATIONS[name].object == (v.category if isinstance(v, Entity) else "date")
                   for name, v in entity.facts.items())  # fmt: skip
        for name, value in entity.facts.items():
            rivals = [v for other, v in entity.facts.items() if RELATIONS[other].object == RELATIONS[name].object]
            assert rivals.count(value) == 1
    people = world.of("person")
    assert sum("teacher" not in person.facts for person in people) == 1
    for person in people:
        assert one(one(person, "spouse"), "spouse") is person
        assert date(*one(person, "birth_date")) < date(*one(person, "burial_date"))
        assert "teacher" not in person.facts or one(one(person, "teacher"), "birth_date") < one(person, "birth_date")
    for region in world.of("region"):
        assert one(one(region, "capital"), "region") is one(one(region, "former_capital"), "region") is region
    for work in world.of("work"):
        life = one(work, "author")
        assert one(life, "birth_date") < one(work, "publication_date") < one(work, "revision_date")
        taken = {one(life, "birthplace"), one(life, "burial_place")}
        assert not taken & {one(work, "publication_place"), one(work, "setting")}
        assert one(life, "employer") not in (one(work, "publisher"), one(work, "sponsor"))
        assert one(work, "translator") is not life
    for organisation in world.of("organisation"):
        life = one(organisation, "founder")
        taken = {one(life, "birthplace"), one(life, "burial_place")}
        assert not taken & {one(organisation, "headquarters"), one(organisation, "branch")}
        assert one(organisation, "director") is not life
        founded = one(organisation, "founding_date")
        assert all(one(person, "birth_date") < founded < one(person, "burial_date") for person in people)
        assert all(founded < one(work, "publication_date") for work in world.of("work"))
        assert founded < one(organisation, "reform_date")


def test_gaps_leave_out_one_thing_of_each_relation() -> None:
    for index in range(50):
        full, gappy = (World(EncyclopediaConfig(gaps=gaps), index) for gaps in (False, True))
        for name, relation in RELATIONS.items():
            stated, kept = (sum(name in entity.facts for entity in world.entities) for world in (full, gappy))
            some = relation.gaps and relation.subject != "region"
            assert stated - kept in ((0, 1) if name == "teacher" else (int(some),)), name


def test_a_world_is_the_same_in_every_larger_encyclopedia() -> None:
    small, large = EncyclopediaConfig(articles=200), EncyclopediaConfig(articles=1_000_000)
    assert list(articles(small)) == [document for _, document in zip(range(200), articles(large), strict=False)]


def test_ids_are_the_numbers_of_the_lines() -> None:
    assert [article.id for article in articles(EncyclopediaConfig(articles=200))] == [str(n) for n in range(200)]


def test_plain_articles_of_a_class_differ_only_in_names() -> None:
    config = EncyclopediaConfig(
        wording="plain", names="short", aliases=False, gaps=False, sentences=1,
        relations=("author", "publication_place", "birthplace", "burial_place"),
    )  # fmt: skip
    texts = [article.text for article in articles(config)]
    assert {re.sub(r"\b[A-Z][a-z]{5}\b", "X", text) for text in texts} == {
        "X was a person born in X and buried in X.",
        "X is a book written by X and published in X.",
        "X is a town.",
        "X is a region.",
        "X is a company.",
    }


def test_varied_articles_use_every_wording() -> None:
    texts = " ".join(article.text for article in articles(EncyclopediaConfig(articles=10_000, sentences=6)))
    for relation in RELATIONS.values():
        usual = f"{relation.auxiliary} {relation.participle}"
        for form in (relation.participle, usual, *relation.predicates, *relation.statements):
            pattern = re.sub(r"\\\{\w\\\}", "[A-Z0-9].*?", re.escape(form))
            assert re.search(pattern, texts), form
    assert all(form.split("{s}")[0].strip() in texts for form in FILLERS)


def test_sentences_that_tell_nothing_deny_nothing() -> None:
    # The other one that a sentence names may well be the author or the birthplace that the article tells.
    for form in (*FILLERS, *MENTIONS):
        assert not re.search(r"\b(?:not|never|nothing|nobody|unrelated)\b", form, re.IGNORECASE), form


def test_mentions_name_another_entity_and_tell_nothing() -> None:
    with_mentions, without = (World(EncyclopediaConfig(distractors=level), 7) for level in (3, 2))
    for slot, entity in enumerate(with_mentions.entities):
        more, less = write_article(with_mentions, slot), write_article(without, slot)
        assert more.contents.startswith(less.contents)
        added = more.contents.removeprefix(less.contents)
        assert entity.name in added
        assert any(other.name in added.replace(entity.name, "") for other in with_mentions.entities)
        assert read_article(more) == read_article(less)


@pytest.mark.parametrize("wording", ["plain", "varied"])
def test_about_half_of_the_entities_have_another_name(wording: Any) -> None:
    config = EncyclopediaConfig(wording=wording)
    entities = [entity for index in range(config.worlds) for entity in World(config, index).entities]
    aliases = [entity.alias for entity in entities]
    assert not any(entity.name in (entity.alias or "") for entity in entities)
    named = [alias for alias in aliases if alias is not None]
    assert 0.45 < len(named) / len(aliases) < 0.55
    assert len(set(named)) == len(named)
    epithets = [alias for alias in named if alias.startswith("the ")]
    assert bool(epithets) == (wording == "varied")
    assert len(epithets) < 0.6 * len(named)
