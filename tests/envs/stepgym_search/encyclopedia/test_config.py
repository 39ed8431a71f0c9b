from __future__ import annotations

import hashlib
from typing import Any

import pytest
from stepgym_search.encyclopedia import KINDS, RELATIONS, EncyclopediaConfig, GeneratedQuestions, articles, config

from stepgym.errors import UserError


def text_digest(config: EncyclopediaConfig) -> str:
    return hashlib.sha256("\0".join(article.contents for article in articles(config)).encode()).hexdigest()


def questions(config: EncyclopediaConfig) -> list[str]:
    return [task.prompt for task in GeneratedQuestions(config, "train")]


CHANGES: list[dict[str, Any]] = [
    {"seed": 1},
    {"articles": 220},
    {"wording": "plain"},
    {"names": "short"},
    {"distractors": 0},
    {"distractors": 2},
    {"distractors": 3},
    {"aliases": False},
    {"sentences": 3},
    {"sentences": 8},
    {"gaps": False},
    {"relations": ("author", "birthplace")},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_of_the_texts_changes_the_texts_and_their_digest(change: dict[str, Any]) -> None:
    usual, changed = EncyclopediaConfig(articles=200), EncyclopediaConfig(**{"articles": 200, **change})
    assert text_digest(usual) != text_digest(changed)
    assert usual.digest != changed.digest


@pytest.mark.parametrize("change", [{"kinds": ("one_hop",)}, {"asked": ("author", "birthplace")}], ids=str)
def test_what_is_asked_changes_the_questions_and_not_the_texts(change: dict[str, Any]) -> None:
    usual, changed = EncyclopediaConfig(articles=200), EncyclopediaConfig(articles=200, **change)
    assert usual.digest == changed.digest
    assert text_digest(usual) == text_digest(changed)
    assert questions(usual) != questions(changed)


def test_relations_that_add_up_to_the_same_texts_have_the_same_digest() -> None:
    one = EncyclopediaConfig(relations=("author", "birthplace"))
    assert one.digest == EncyclopediaConfig(relations=("birthplace", "author", "author")).digest
    assert EncyclopediaConfig().digest == EncyclopediaConfig(relations=tuple(RELATIONS)).digest


def test_a_later_version_of_the_texts_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = EncyclopediaConfig().digest
    monkeypatch.setattr(config, "_VERSION", 1_000)
    assert EncyclopediaConfig().digest != before


def test_without_kinds_all_that_the_articles_allow_are_drawn_from() -> None:
    assert EncyclopediaConfig().every_kind == KINDS
    assert EncyclopediaConfig(gaps=False).every_kind == KINDS[:-1]
    assert EncyclopediaConfig(relations=("author",)).every_kind == ("one_hop", "unanswerable")
    assert EncyclopediaConfig(relations=("birth_date",), gaps=False).every_kind == ("date", "comparison")


def test_distractors_and_sentences_decide_what_is_stated() -> None:
    def stated(**options: Any) -> list[str]:
        return [relation.name for relation in EncyclopediaConfig(kinds=("one_hop",), **options).stated["work"]]

    assert stated(distractors=0) == ["author", "publication_place", "publication_date", "publisher"]
    assert stated(distractors=1, sentences=2) == ["author", "translator", "publication_place", "setting"]
    assert len(stated(distractors=1, sentences=4)) == 8
    assert stated(relations=("setting", "author")) == ["author", "setting"]


def test_lists_are_as_good_as_tuples() -> None:
    given: Any = ["two_hop"]
    config = EncyclopediaConfig(kinds=given)
    assert config.kinds == ("two_hop",)
    assert hash(config) == hash(EncyclopediaConfig(kinds=("two_hop",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kinds": ("two_hops",)},
            r"search: unknown name 'two_hops' in kinds; did you mean 'two_hop'\? Known: one_hop",
        ),
        ({"kinds": ()}, r"search: kinds must be a list of names, not \(\); known: one_hop"),
        ({"kinds": "two_hop"}, "search: kinds must be a list of names, not 'two_hop'; known: one_hop"),
        ({"relations": ("birthplac",)}, r"unknown name 'birthplac' in relations; did you mean 'birthplace'\?"),
        ({"asked": ("wrote",)}, "unknown name 'wrote' in asked;"),
        ({"wording": "fancy"}, "unknown name 'fancy' in wording; Known: plain, varied"),
        ({"names": "long"}, "unknown name 'long' in names; Known: full, short"),
        ({"articles": 180}, "search: articles must be a whole number from 200 to 1,000,000, not 180"),
        ({"articles": 1_000_020}, "search: articles must be a whole number from 200 to 1,000,000, not 1000020"),
        ({"articles": 2010}, "search: articles must be a multiple of 20, not 2010; try 2000"),
        ({"articles": 2000.0}, "search: articles must be a whole number"),
        ({"distractors": 4}, "search: distractors must be a whole number from 0 to 3, not 4"),
        ({"distractors": True}, "search: distractors must be a whole number"),
        ({"sentences": 0}, "search: sentences must be a whole number from 1 to 8, not 0"),
        ({"seed": "x"}, "search: seed must be a whole number, not 'x'"),
        ({"relations": ("author",), "asked": ("setting",)}, "search: asked: no article states 'setting'"),
        ({"distractors": 0, "asked": ("setting",)}, "search: asked: no article states 'setting'"),
        ({"kinds": ("unanswerable",), "gaps": False}, "search: the kind 'unanswerable' needs gaps: true"),
        (
            {"kinds": ("unanswerable",), "asked": ("spouse", "region", "capital")},
            "of the kind 'unanswerable' can be asked",
        ),
        ({"kinds": ("one_hop", "three_hop"), "relations": ("author", "birthplace")}, "of the kind 'three_hop' can be"),
        ({"kinds": ("comparison",), "asked": ("author",)}, "no question of the kind 'comparison' can be asked"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        EncyclopediaConfig(**options)
    assert str(raised.value).startswith("search: ")
    assert "\n" not in str(raised.value)
