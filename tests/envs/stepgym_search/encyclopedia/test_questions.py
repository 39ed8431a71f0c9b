from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgym_search.document import Document
from stepgym_search.encyclopedia import (
    KINDS,
    QUESTIONS_PER_WORLD,
    RELATIONS,
    SPLITS,
    EncyclopediaConfig,
    GeneratedQuestions,
    articles,
)
from stepgym_search.encyclopedia.article import write_article
from stepgym_search.encyclopedia.candidates import Candidate
from stepgym_search.encyclopedia.draws import Stream
from stepgym_search.encyclopedia.questions import _compare, _slips, draw_task
from stepgym_search.encyclopedia.reader import read_answers
from stepgym_search.encyclopedia.relations import COMPARISONS, UNKNOWN, UNKNOWN_RULE
from stepgym_search.encyclopedia.splits import split_of
from stepgym_search.encyclopedia.world import Entity, World
from stepgym_search.scoring import is_match, normalize_answer

from stepgym.env.task import Task
from stepgym.errors import UserError

TINY = EncyclopediaConfig(
    articles=2000,
    kinds=("two_hop",),
    wording="plain",
    names="short",
    aliases=False,
    gaps=False,
    sentences=1,
    relations=("author", "publication_place", "birthplace", "burial_place"),
    asked=("author", "birthplace"),
)
"""What a model of half a million parameters can learn in minutes."""

USUAL = EncyclopediaConfig(articles=10_000)
HARD = EncyclopediaConfig(seed=3, articles=10_000, distractors=3, sentences=6, kinds=("three_hop", "unanswerable"))

texts = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**40), 2**40),
        "articles": st.just(1_000_000),
        "wording": st.sampled_from(["plain", "varied"]),
        "names": st.sampled_from(["full", "short"]),
        "distractors": st.integers(0, 3),
        "aliases": st.booleans(),
        "sentences": st.integers(2, 8),
        "gaps": st.booleans(),
    }
)
"""Options of encyclopedias of every sort in which each kind but the unanswerable can be asked."""


@lru_cache(maxsize=8)
def written(config: EncyclopediaConfig, index: int) -> tuple[dict[str, Entity], dict[str, Document]]:
    """What a world's articles are about and the articles, by id."""
    world = World(config, index)
    every = [write_article(world, slot) for slot in range(len(world.entities))]
    return {entity.id: entity for entity in world.entities}, {article.id: article for article in every}


def documents(config: EncyclopediaConfig, task: Task) -> dict[str, Document]:
    """The articles of a task's world, by id."""
    return written(config, task.data["world"])[1]


@lru_cache(maxsize=3)
def usual_tasks(split: str) -> list[Task]:
    """All questions of a split of the usual encyclopedia."""
    return list(GeneratedQuestions(USUAL, split))


def by_world(config: EncyclopediaConfig, split: str, worlds: int) -> Iterator[Task]:
    """All questions about the first worlds of a split, one world after another."""
    tasks = GeneratedQuestions(config, split)
    count = len(tasks) // QUESTIONS_PER_WORLD
    for place in range(min(worlds, count)):
        yield from tasks[place::count]


def check_proof(config: EncyclopediaConfig, task: Task) -> None:
    """Read the answer back from the articles' texts: from those the task names, and from all of its world."""
    world, plan = documents(config, task), task.data["plan"]
    proof = [world[id] for id in task.data["articles"]]
    assert task.answer
    assert read_answers(task.prompt, world.values()) == task.answer
    if task.data["kind"] in ("two_hop", "three_hop") and not config.aliases:
        assert read_answers(task.prompt, proof) == task.answer
    else:  # another name of the answer stands in an article of its own
        assert read_answers(task.prompt, proof)[0] == task.answer[0]
    golden = {normalize_answer(answer) for answer in task.answer}
    assert "" not in golden
    assert normalize_answer(plan["answer"]) in golden
    assert len(plan["searches"]) == len(proof) == task.data["hops"]
    # Whoever follows the plan finds each search in what has been read before, and the answer in what was found.
    read = task.prompt
    for search, article in zip(plan["searches"], proof, strict=True):
        assert search in read
        assert search in article.contents
        read += "\n" + article.contents
    if task.data["kind"] != "unanswerable":
        assert plan["answer"] in read.replace(task.prompt, "")
    # What is taken from each article leads on to the next.
    read_of, _ = written(config, task.data["world"])
    for place, (id, taken) in enumerate(zip(task.data["articles"], plan["takes"], strict=True)):
        value = read_of[id].facts.get(taken)
        if task.data["kind"] == "comparison":
            assert isinstance(value, tuple)
        elif place + 1 < len(proof):
            assert isinstance(value, Entity)
            assert value.id == task.data["articles"][place + 1]
        else:
            assert (value is None) == (task.data["kind"] == "unanswerable")
    for name, slip in plan["slips"].items():
        assert slip["takes"] in read_of[task.data["articles"][slip["searches"] - 1]].facts
        assert name == "stop" or slip["takes"] != plan["takes"][-1]
        assert normalize_answer(slip["answer"]) not in golden
        assert not is_match(slip["answer"], task.answer, "substring")
        count = slip["searches"]
        assert 1 <= count < len(proof) if name == "stop" else count == len(proof)
        seen = task.prompt + "".join(article.contents for article in proof[:count])
        assert slip["answer"] in seen


def slips_by_kind(tasks: list[Task]) -> Counter[tuple[str, str]]:
    return Counter((task.data["kind"], slip) for task in tasks for slip in task.data["plan"]["slips"])


@pytest.mark.parametrize("config", [USUAL, TINY, HARD], ids=["usual", "tiny", "hard"])
def test_every_golden_answer_can_be_read_in_the_articles(config: EncyclopediaConfig) -> None:
    for split in SPLITS:
        for task in by_world(config, split, 140):
            check_proof(config, task)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=texts, kind=st.sampled_from(KINDS), world=st.integers(0, 49_999), number=st.integers(0, 4))
def test_every_encyclopedia_proves_its_answers(options: dict[str, Any], kind: str, world: int, number: int) -> None:
    if kind == "unanswerable":
        options["gaps"] = True
    if options["sentences"] == 2 and kind in ("date", "comparison"):
        options["relations"] = ("birthplace", "birth_date", "author", "founding_date")
    config = EncyclopediaConfig(kinds=(kind,), **options)
    task = draw_task(config, world, number)
    assert task is not None
    assert task.data["kind"] == kind
    check_proof(config, task)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.sets(st.sampled_from(sorted(RELATIONS)), min_size=1, max_size=4),
    gaps=st.booleans(),
    seed=st.integers(0, 1000),
    world=st.integers(0, 49_999),
)
def test_whatever_relations_are_asked_about_there_are_questions(
    asked: set[str], gaps: bool, seed: int, world: int
) -> None:
    config = EncyclopediaConfig(seed=seed, articles=1_000_000, asked=tuple(sorted(asked)), gaps=gaps)
    tasks = [task for number in range(QUESTIONS_PER_WORLD) if (task := draw_task(config, world, number))]
    assert len(tasks) == QUESTIONS_PER_WORLD
    assert {task.data["kind"] for task in tasks} <= set(config.every_kind)
    for task in tasks:
        check_proof(config, task)


def test_no_article_elsewhere_is_about_the_same_things() -> None:
    # Read with all 4,000 articles at once, not only those of its world, a question has the same answers.
    config = replace(USUAL, articles=4_000)
    every = list(articles(config))
    names = Counter(article.title for article in every)
    assert max(names.values()) == 1
    for task in GeneratedQuestions(config, "test")[:2]:
        assert read_answers(task.prompt, every) == task.answer


def test_kinds_come_up_equally_often_and_are_what_they_are_called() -> None:
    tasks = usual_tasks("train")[:1800]
    counts = Counter(task.data["kind"] for task in tasks)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) < 1.15 * min(counts.values())
    hops = {kind: {task.data["hops"] for task in tasks if task.data["kind"] == kind} for kind in KINDS}
    assert hops == {
        "one_hop": {1}, "two_hop": {2}, "three_hop": {3}, "date": {1, 2}, "comparison": {2}, "unanswerable": {1, 2},
    }  # fmt: skip
    for task in tasks:
        assert (len(task.answer) == 3 and bool(re.search(r"\d{4}", task.answer[0]))) == (task.data["kind"] == "date")
        assert (task.answer == list(UNKNOWN)) == (task.data["kind"] == "unanswerable")


def test_questions_read_like_questions() -> None:
    others = [task for config in (TINY, HARD) for task in GeneratedQuestions(config, "train")[:1000]]
    for task in (*usual_tasks("train")[:1000], *others):
        question = task.prompt.removesuffix(UNKNOWN_RULE)
        assert re.fullmatch(r"(In |On |By )?[A-Za-z]+ [A-Za-z ]+(, [A-Za-z ]+)?\?", question), question
        assert "  " not in question
        assert question[0].isupper()
        assert not any(re.search(rf"\b{re.escape(answer)}\b", question) for answer in task.answer) or (
            task.data["kind"] == "comparison"
        )


@pytest.mark.parametrize("kinds", [None, ("unanswerable",), ("one_hop", "unanswerable")])
def test_every_question_says_what_to_do_where_some_have_no_answer(kinds: tuple[str, ...] | None) -> None:
    tasks = list(GeneratedQuestions(replace(USUAL, kinds=kinds), "train")[:300])
    assert all(task.prompt.endswith(UNKNOWN_RULE) for task in tasks)
    others = GeneratedQuestions(replace(USUAL, kinds=("one_hop", "date")), "train")[:300]
    assert not any("unknown" in task.prompt for task in others)


def test_a_tiny_models_questions_have_one_wording_and_both_slips() -> None:
    tasks = [task for split in SPLITS for task in GeneratedQuestions(TINY, split)]
    assert len(tasks) == 500
    assert {re.sub("[A-Z][a-z]{5}", "X", task.prompt.removeprefix("Where ")) for task in tasks} == {
        "was the author of X born?"
    }
    assert len({task.prompt for task in tasks}) == 500
    assert slips_by_kind(tasks) == {("two_hop", "stop"): 500, ("two_hop", "field"): 500}
    for task in tasks:
        work, life = (documents(TINY, task)[id] for id in task.data["articles"])
        slips = task.data["plan"]["slips"]
        assert work.text.endswith(f"and published in {slips['stop']['answer']}.")
        assert life.text.endswith(f"born in {task.answer[0]} and buried in {slips['field']['answer']}.")


def test_varied_questions_use_every_wording() -> None:
    asked = [task.prompt for task in GeneratedQuestions(EncyclopediaConfig(articles=100_000), "train")[:4000]]
    for relation in RELATIONS.values():
        for form in (*relation.questions, *(relation.phrases if relation.object != "date" else ())):
            before, after = form.split("{x}")
            assert any(after in question.partition(before)[2] for question in asked), form


def test_questions_and_answers_use_other_names() -> None:
    tasks = usual_tasks("train")[:1500]
    named = [task for task in tasks if task.data["kind"] not in ("date", "unanswerable")]
    assert {len(task.answer) for task in named} == {1, 2}
    firsts = [documents(USUAL, task)[task.data["articles"][0]].title.strip('"') for task in tasks[:300]]
    by_alias = [task for task, first in zip(tasks, firsts, strict=False) if first not in task.prompt]
    assert 30 < len(by_alias) < 150
    assert all(task.data["plan"]["searches"][0] in task.prompt for task in by_alias)


def test_distractors_make_the_field_slip() -> None:
    without = list(GeneratedQuestions(replace(USUAL, distractors=0, kinds=("one_hop", "two_hop")), "train")[:1000])
    assert "field" not in {slip for _, slip in slips_by_kind(without)}
    with_them = list(GeneratedQuestions(replace(USUAL, kinds=("one_hop", "two_hop")), "train")[:1000])
    counts = slips_by_kind(with_them)
    assert counts["one_hop", "field"] > 350
    assert counts["two_hop", "field"] > 350


def test_a_slip_is_wrong_even_where_a_golden_answer_inside_it_would_do() -> None:
    names = EncyclopediaConfig().name_book
    work = Entity(15, 15, "work", "novel", names, {"publication_date": (1874, 3, 12)})
    life = Entity(0, 0, "person", "poet", names, {"birth_date": (1874, 3, 2), "burial_date": (1940, 1, 1)})
    asked = RELATIONS["birth_date"]
    field = {"searches": 2, "takes": "burial_date", "answer": "1 January 1940"}
    assert _slips([work, life], asked, ["2 March 1874"]) == {"field": field}
    stop = {"searches": 1, "takes": "publication_date", "answer": "12 March 1874"}
    assert _slips([work, life], asked, ["3 March 1874"]) == {"stop": stop, "field": field | {
        "takes": "birth_date", "answer": "2 March 1874"}}  # fmt: skip


def test_two_of_which_one_name_holds_the_other_are_not_compared() -> None:
    world = World(EncyclopediaConfig(gaps=False, aliases=False), 0)
    one, other = world.entities[:2]
    birth = next(comparison for comparison in COMPARISONS if comparison.relation == "birth_date")
    pair = [Candidate((0, 1), (RELATIONS["birth_date"],), birth, later) for later in (False, True)]
    assert all(_compare(world, candidate, Stream()) for candidate in pair)
    one.name, other.name = "Kabelu", "Kabelura"
    solved = [_compare(world, candidate, Stream()) for candidate in pair]
    assert [answer.said for answer in solved if answer is not None] == ["Kabelura"]


def test_comparisons_ask_for_either_end_and_the_first_named_is_right_half_of_the_time() -> None:
    tasks = list(GeneratedQuestions(replace(USUAL, kinds=("comparison",), aliases=False), "train")[:1000])
    first = sum(task.answer[0] == task.data["plan"]["searches"][0] for task in tasks)
    assert 430 < first < 570
    later = sum(bool(re.search("later|younger", task.prompt)) for task in tasks)
    assert 400 < later < 600
    assert all(set(task.data["plan"]["slips"]) >= {"stop"} for task in tasks)


def test_ids_are_unique_and_say_split_and_world() -> None:
    tasks = [task for split in SPLITS for task in usual_tasks(split)]
    assert len(tasks) == 500 * QUESTIONS_PER_WORLD
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks[::50]:
        split, world, number = task.id.split("-")
        assert (split, int(world)) == (split_of(int(world)), task.data["world"])
        assert draw_task(USUAL, int(world), int(number)) == task


def test_no_two_splits_share_a_world_and_no_two_questions_are_the_same() -> None:
    worlds: dict[str, set[int]] = {}
    questions: Counter[str] = Counter()
    for split in SPLITS:
        tasks = usual_tasks(split)
        worlds[split] = {task.data["world"] for task in tasks}
        questions.update(task.prompt for task in tasks)
        first = [task.data["world"] for task in tasks[: len(worlds[split])]]
        assert len(set(first)) == len(first)  # every world once before any comes again
    assert all(not worlds[one] & worlds[other] for one, other in permutations(SPLITS, 2))
    assert max(questions.values()) == 1


def test_questions_are_a_sequence() -> None:
    tasks = GeneratedQuestions(TINY, "test")
    assert len(tasks) == 10 * QUESTIONS_PER_WORLD
    assert tasks[-1] == list(tasks)[-1] == tasks[len(tasks) - 1]
    assert list(tasks[5:20:5]) == [tasks[5], tasks[10], tasks[15]]
    assert len(tasks[10:][:3]) == 3
    assert tasks[10:][0] == tasks[10]
    assert tasks[3] in tasks
    with pytest.raises(IndexError):
        tasks[len(tasks)]


def test_the_smallest_encyclopedia_has_questions_in_every_split() -> None:
    assert [len(GeneratedQuestions(EncyclopediaConfig(articles=200), split)) for split in SPLITS] == [40, 5, 5]


def test_a_question_of_a_million_articles_needs_none_of_the_others() -> None:
    large = replace(USUAL, articles=1_000_000)
    tasks = GeneratedQuestions(large, "test")
    assert len(tasks) == 25_000
    check_proof(large, tasks[-1])


def test_a_world_asks_the_same_in_every_larger_encyclopedia() -> None:
    small, large = draw_task(USUAL, 17, 2), draw_task(replace(USUAL, articles=1_000_000), 17, 2)
    assert small is not None
    assert large is not None
    assert small.data["encyclopedia"] != large.data["encyclopedia"]
    same = [Task(t.id, t.prompt, t.answer, {**t.data, "encyclopedia": None}) for t in (small, large)]
    assert same[0] == same[1]


def test_tasks_are_json() -> None:
    for task in GeneratedQuestions(USUAL, "validation")[:100]:
        assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_an_unknown_split_is_a_users_error() -> None:
    with pytest.raises(UserError, match=r"search: unknown split 'tset'; did you mean 'test'\? Known: train, valid"):
        GeneratedQuestions(TINY, "tset")


def test_a_world_that_allows_no_question_is_passed_over() -> None:
    # The teacher is the next older person, the oldest has none, and whose article leaves it out is drawn: in some
    # worlds nobody's teacher's teacher's teacher can be found.
    config = EncyclopediaConfig(articles=5_000, asked=("teacher",), kinds=("three_hop",))
    tasks = list(GeneratedQuestions(config, "train"))
    own = [task for task in tasks if task.id.split("-")[1] == str(task.data["world"])]
    assert 0.5 < len(own) / len(tasks) < 1
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks[:200]:
        assert split_of(task.data["world"]) == "train"
        check_proof(config, task)
    world = next(int(task.id.split("-")[1]) for task in tasks if task not in own)
    assert draw_task(config, world, 0) is None


def test_another_process_draws_the_same_tasks() -> None:
    code = (
        "import json; from stepgym_search.encyclopedia import *; "
        "print(json.dumps([t.to_dict() for t in GeneratedQuestions(EncyclopediaConfig(articles=400), 'train')[:40]]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    ]
    here = [task.to_dict() for task in GeneratedQuestions(EncyclopediaConfig(articles=400), "train")[:40]]
    assert json.loads(runs[0]) == json.loads(runs[1]) == here
