"""The kinds of facts there are, how articles state each of them, and how questions ask for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepgym_search.encyclopedia.categories import CATEGORIES, Category

ObjectKind: TypeAlias = Literal["person", "town", "region", "organisation", "work", "date"]


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: the article of a `subject` says which `object` it has.

    In the wordings `{s}` stands for the subject, `{o}` for the object, `{x}` for what is asked about: a name, or
    another relation's phrase. The first wording of each is the one that plain encyclopedias and questions use.

    Attributes:
        name: As configurations name it.
        subject: Whose article states it.
        object: What the answer is.
        auxiliary: What stands before the participle.
        participle: As in "a novel written by {o}".
        predicates: Other ways to go on after the subject.
        statements: Whole sentences, without the full stop.
        phrases: What the object is called within a longer question, as in "the author of {x}".
        questions: What asks for the object.
        gaps: Whether an article may leave it out. Not where another article would give it away.
    """

    name: str
    subject: Category
    object: ObjectKind
    auxiliary: str
    participle: str
    predicates: tuple[str, ...]
    statements: tuple[str, ...]
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    gaps: bool = True


_ALL = (
    Relation(
        "birthplace", "person", "town", "was", "born in {o}",
        ("came into the world in {o}", "was a native of {o}"),
        ("The birthplace of {s} was {o}",),
        ("the birthplace of {x}", "the town where {x} was born"),
        ("Where was {x} born?", "In which town was {x} born?", "What is the birthplace of {x}?"),
    ),
    Relation(
        "burial_place", "person", "town", "was", "buried in {o}",
        ("was laid to rest in {o}",),
        ("The grave of {s} is in {o}",),
        ("the burial place of {x}", "the town where {x} was buried"),
        ("Where was {x} buried?", "In which town is the grave of {x}?"),
    ),
    Relation(
        "birth_date", "person", "date", "was", "born on {o}",
        ("came into the world on {o}",),
        ("The date of birth of {s} was {o}",),
        ("the date of birth of {x}",),
        ("When was {x} born?", "On which day was {x} born?", "What is the date of birth of {x}?"),
    ),
    Relation(
        "burial_date", "person", "date", "was", "buried on {o}",
        ("was laid to rest on {o}",),
        ("The funeral of {s} was held on {o}",),
        ("the date of the funeral of {x}",),
        ("When was {x} buried?", "On which day was the funeral of {x}?"),
    ),
    Relation(
        "teacher", "person", "person", "was", "taught by {o}",
        ("was a pupil of {o}", "studied under {o}"),
        ("The teacher of {s} was {o}",),
        ("the teacher of {x}", "the person who taught {x}"),
        ("Who taught {x}?", "Who was the teacher of {x}?"),
    ),
    Relation(
        "spouse", "person", "person", "was", "married to {o}",
        ("lived in wedlock with {o}",),
        ("The spouse of {s} was {o}",),
        ("the spouse of {x}", "the person married to {x}"),
        ("Who was married to {x}?", "Who was the spouse of {x}?"),
        gaps=False,
    ),
    Relation(
        "employer", "person", "organisation", "was", "employed by {o}",
        ("worked for {o}", "earned a living at {o}"),
        ("The employer of {s} was {o}",),
        ("the employer of {x}", "the organisation that {x} worked for"),
        ("Who employed {x}?", "Which organisation did {x} work for?"),
    ),
    Relation(
        "school", "person", "organisation", "was", "trained at {o}",
        ("was an apprentice at {o}", "learned the trade at {o}"),
        ("The training of {s} took place at {o}",),
        ("the training place of {x}", "the organisation that trained {x}"),
        ("Where was {x} trained?", "Which organisation trained {x}?"),
    ),
    Relation(
        "region", "town", "region", "is", "located in {o}",
        ("lies in {o}", "belongs to {o}"),
        ("The region around {s} is {o}",),
        ("the region of {x}", "the region that {x} lies in"),
        ("In which region is {x}?", "Which region does {x} lie in?"),
        gaps=False,
    ),
    Relation(
        "claimant", "town", "region", "is", "claimed by {o}",
        ("is said by some to be the property of {o}",),
        ("The region that lays claim to {s} is {o}",),
        ("the claimant of {x}", "the region that claims {x}"),
        ("Which region claims {x}?", "By which region is {x} claimed?"),
    ),
    Relation(
        "governor", "town", "person", "is", "governed by {o}",
        ("has {o} for its governor",),
        ("The governor of {s} is {o}",),
        ("the governor of {x}", "the person who governs {x}"),
        ("Who governs {x}?", "Who is the governor of {x}?"),
    ),
    Relation(
        "planner", "town", "person", "was", "planned by {o}",
        ("was laid out by {o}", "owes its streets to {o}"),
        ("The streets of {s} were drawn by {o}",),
        ("the planner of {x}", "the person who planned {x}"),
        ("Who planned {x}?", "Who was the planner of {x}?"),
    ),
    Relation(
        "charter_date", "town", "date", "was", "chartered on {o}",
        ("received its charter on {o}",),
        ("The charter of {s} is dated {o}",),
        ("the date of the charter of {x}",),
        ("When was {x} chartered?", "On which day did {x} receive its charter?"),
    ),
    Relation(
        "siege_date", "town", "date", "was", "besieged on {o}",
        ("came under siege on {o}",),
        ("The siege of {s} began on {o}",),
        ("the date of the siege of {x}",),
        ("When was {x} besieged?", "On which day did the siege of {x} begin?"),
    ),
    Relation(
        "capital", "region", "town", "is", "governed from {o}",
        ("has its seat of government in {o}",),
        ("The capital of {s} is {o}",),
        ("the capital of {x}", "the town that {x} is governed from"),
        ("What is the capital of {x}?", "Which town is {x} governed from?"),
    ),
    Relation(
        "former_capital", "region", "town", "was", "once governed from {o}",
        ("formerly had its court in {o}",),
        ("The former capital of {s} is {o}",),
        ("the former capital of {x}", "the town that {x} was once governed from"),
        ("What was the former capital of {x}?", "Which town was {x} once governed from?"),
    ),
    Relation(
        "ruler", "region", "person", "is", "ruled by {o}",
        ("obeys {o}",),
        ("The ruler of {s} is {o}",),
        ("the ruler of {x}", "the person who rules {x}"),
        ("Who rules {x}?", "Who is the ruler of {x}?"),
    ),
    Relation(
        "surveyor", "region", "person", "was", "surveyed by {o}",
        ("was measured by {o}",),
        ("The surveyor of {s} was {o}",),
        ("the surveyor of {x}", "the person who surveyed {x}"),
        ("Who surveyed {x}?", "Who was the surveyor of {x}?"),
    ),
    Relation(
        "founder", "organisation", "person", "was", "founded by {o}",
        ("was set up by {o}", "owes its existence to {o}"),
        ("The founder of {s} was {o}",),
        ("the founder of {x}", "the person who founded {x}"),
        ("Who founded {x}?", "Who was the founder of {x}?"),
    ),
    Relation(
        "director", "organisation", "person", "is", "led by {o}",
        ("has {o} for its director",),
        ("The director of {s} is {o}",),
        ("the director of {x}", "the person who leads {x}"),
        ("Who leads {x}?", "Who is the director of {x}?"),
    ),
    Relation(
        "headquarters", "organisation", "town", "is", "based in {o}",
        ("has its main building in {o}",),
        ("The headquarters of {s} are in {o}",),
        ("the home town of {x}", "the town where {x} is based"),
        ("Where is {x} based?", "In which town does {x} have its headquarters?"),
    ),
    Relation(
        "branch", "organisation", "town", "is", "represented in {o}",
        ("keeps a branch in {o}",),
        ("The only branch of {s} is in {o}",),
        ("the branch town of {x}", "the town where {x} has its branch"),
        ("Where is {x} represented?", "In which town does {x} have its branch?"),
    ),
    Relation(
        "founding_date", "organisation", "date", "was", "founded on {o}",
        ("was set up on {o}", "opened its doors on {o}"),
        ("The founding day of {s} was {o}",),
        ("the founding day of {x}",),
        ("When was {x} founded?", "On which day was {x} founded?"),
    ),
    Relation(
        "reform_date", "organisation", "date", "was", "reorganised on {o}",
        ("got a new constitution on {o}",),
        ("The reform of {s} is dated {o}",),
        ("the date of the reform of {x}",),
        ("When was {x} reorganised?", "On which day was {x} reorganised?"),
    ),
    Relation(
        "author", "work", "person", "was", "written by {o}",
        ("came from the pen of {o}", "is the work of {o}"),
        ("The author of {s} is {o}", "{o} wrote {s}"),
        ("the author of {x}", "the person who wrote {x}"),
        ("Who wrote {x}?", "Who is the author of {x}?"),
    ),
    Relation(
        "translator", "work", "person", "was", "translated by {o}",
        ("reached other countries through {o}",),
        ("The translator of {s} is {o}", "{o} translated {s}"),
        ("the translator of {x}", "the person who translated {x}"),
        ("Who translated {x}?", "Who is the translator of {x}?"),
    ),
    Relation(
        "publication_place", "work", "town", "was", "published in {o}",
        ("first came out in {o}", "was brought out in {o}"),
        ("The place of publication of {s} is {o}",),
        ("the place of publication of {x}", "the town where {x} was published"),
        ("Where was {x} published?", "In which town was {x} published?"),
    ),
    Relation(
        "setting", "work", "town", "is", "set in {o}",
        ("takes place in {o}", "unfolds in {o}"),
        ("The scene of {s} is {o}",),
        ("the setting of {x}", "the town where {x} is set"),
        ("Where is {x} set?", "In which town does {x} take place?"),
    ),
    Relation(
        "publication_date", "work", "date", "was", "published on {o}",
        ("first came out on {o}",),
        ("The date of publication of {s} is {o}",),
        ("the date of publication of {x}",),
        ("When was {x} published?", "On which day was {x} published?"),
    ),
    Relation(
        "revision_date", "work", "date", "was", "revised on {o}",
        ("was brought up to date on {o}",),
        ("The revision of {s} is dated {o}",),
        ("the date of the revision of {x}",),
        ("When was {x} revised?", "On which day was {x} revised?"),
    ),
    Relation(
        "publisher", "work", "organisation", "was", "published by {o}",
        ("was brought out by {o}",),
        ("The publisher of {s} is {o}",),
        ("the publisher of {x}", "the organisation that published {x}"),
        ("Who published {x}?", "Which organisation published {x}?"),
    ),
    Relation(
        "sponsor", "work", "organisation", "was", "paid for by {o}",
        ("was made possible by {o}",),
        ("The sponsor of {s} is {o}",),
        ("the sponsor of {x}", "the organisation that paid for {x}"),
        ("Who paid for {x}?", "Which organisation paid for {x}?"),
    ),
)  # fmt: skip

RELATIONS: dict[str, Relation] = {relation.name: relation for relation in _ALL}
"""Every relation by name, in the order in which articles state them; of two with the same subject and object the first
is the one that an encyclopedia without distractors keeps."""

UNKNOWN = ("unknown", "not stated", "not known")
"""What answers a question that the encyclopedia does not answer."""

UNKNOWN_RULE = " If the encyclopedia does not tell, answer unknown."
"""What every question ends with where some have no answer."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which of two came first, or last: questions with both names in them, and the relation that decides.

    Attributes:
        relation: Name of a relation whose object is a date.
        earlier: Questions for the one with the earlier date, `{a}` and `{b}` for the two.
        later: Questions for the other.
    """

    relation: str
    earlier: tuple[str, ...]
    later: tuple[str, ...]


COMPARISONS = (
    Comparison(
        "birth_date",
        ("Who was born earlier, {a} or {b}?", "Who is older, {a} or {b}?"),
        ("Who was born later, {a} or {b}?", "Who is younger, {a} or {b}?"),
    ),
    Comparison(
        "charter_date",
        ("Which town was chartered earlier, {a} or {b}?", "Which town has the older charter, {a} or {b}?"),
        ("Which town was chartered later, {a} or {b}?",),
    ),
    Comparison(
        "founding_date",
        ("Which was founded earlier, {a} or {b}?", "Which organisation is older, {a} or {b}?"),
        ("Which was founded later, {a} or {b}?", "Which organisation is younger, {a} or {b}?"),
    ),
    Comparison(
        "publication_date",
        ("Which was published earlier, {a} or {b}?", "Which work came out first, {a} or {b}?"),
        ("Which was published later, {a} or {b}?",),
    ),
)


def stated_relations(names: Iterable[str], distractors: int, facts: int) -> dict[Category, tuple[Relation, ...]]:
    """What the articles of each class state.

    Args:
        names: The relations to choose from.
        distractors: 0 keeps the first of those with the same subject and object, more keeps all.
        facts: Most facts in an article; the last are left out.
    """
    wanted = set(names)
    stated: dict[Category, tuple[Relation, ...]] = {}
    for category in CATEGORIES:
        kept: list[Relation] = []
        for relation in RELATIONS.values():
            if relation.subject != category or relation.name not in wanted:
                continue
            if distractors or all(relation.object != other.object for other in kept):
                kept.append(relation)
        stated[category] = tuple(kept[:facts])
    return stated
