"""The questions about an encyclopedia, with golden answers that its articles prove; each made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeAlias, overload

from stepgym.env.task import Task
from stepgym.errors import UserError
from stepgym.seeds import derive_seed
from stepgym_search.encyclopedia.candidates import Candidate
from stepgym_search.encyclopedia.config import EncyclopediaConfig
from stepgym_search.encyclopedia.dates import Day, spellings
from stepgym_search.encyclopedia.draws import Stream, permute
from stepgym_search.encyclopedia.relations import RELATIONS, UNKNOWN, UNKNOWN_RULE, Relation
from stepgym_search.encyclopedia.splits import SPLITS, split_of, world_of, worlds_in
from stepgym_search.encyclopedia.world import Entity, World
from stepgym_search.scoring import is_match

QUESTIONS_PER_WORLD = 5
_MOST_PASSED_OVER = 100

Slip: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Solved:
    """A candidate in a world: what the question calls those it is about, whose articles are read, what they say."""

    mentions: list[str]
    read: list[Entity]
    answers: list[str]
    said: str
    slips: dict[str, Slip]


class GeneratedQuestions(Sequence[Task]):
    """The questions of a split, made on demand: the same config, split and index give the same task everywhere.

    Five about each of the split's worlds: index `i` is about world `i % n` of its `n`, or, where that allows no
    question of the chosen kinds, about the next one that does. A task's `prompt` is the question, its `answer` the
    golden answers, and its `data` say how it can be solved:

    - `encyclopedia`: digest of the texts; `world`; `kind`; `hops`, the articles to be read.
    - `plan`: the `searches` of one who knows what to look for, what each article read is good for (`takes`, names of
      relations), the `answer` as the last article writes it, and `slips`: by name, after how many of the searches one
      might take what, and give which wrong `answer`. `stop` takes what an earlier article says, `field` another fact
      of the same kind from the last.
    - `articles`: ids of those that prove the answer, one for each search.

    Raises `UserError` for a split that does not exist.
    """

    def __init__(self, config: EncyclopediaConfig, split: str, indices: range | None = None) -> None:
        if split not in SPLITS:
            close = get_close_matches(split, SPLITS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"search: unknown split {split!r}; {hint}Known: {', '.join(SPLITS)}")
        self._config = config
        self._split = split
        self._worlds = worlds_in(split, config.worlds)
        self._indices = range(self._worlds * QUESTIONS_PER_WORLD) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> GeneratedQuestions: ...
    def __getitem__(self, index: int | slice) -> Task | GeneratedQuestions:
        if isinstance(index, slice):
            return GeneratedQuestions(self._config, self._split, self._indices[index])
        number, place = divmod(self._indices[index], self._worlds)
        own = world_of(self._split, place)
        for turn in range(min(self._worlds, _MOST_PASSED_OVER)):
            task = draw_task(self._config, world_of(self._split, (place + turn) % self._worlds), number)
            if task is not None:
                return replace(task, id=f"{self._split}-{own}-{number}")
        raise UserError(
            f"search: no question of the kinds {', '.join(self._config.every_kind)} can be asked of these articles; "
            "choose other kinds, or more relations"
        )

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))


def draw_task(config: EncyclopediaConfig, world: int, number: int) -> Task | None:
    """Question `number`, below five, about a world.

    None where the world, with what its articles leave out, allows no question of the config's kinds.
    """
    draw = Stream(config.seed, "question", world, number)
    kinds = config.every_kind
    made = World(config, world)
    for turn in range(len(kinds)):
        kind = kinds[(world + number + turn) % len(kinds)]
        for candidate in _in_turn(config, kind, world, number):
            solved = _solve(made, kind, candidate, draw)
            if solved is not None:
                return _task(made, kind, number, candidate, solved, draw)
    return None


def _in_turn(config: EncyclopediaConfig, kind: str, world: int, number: int) -> Iterator[Candidate]:
    """The candidates of a kind in an order drawn for the world, every fifth of them for each question of the world.

    So two questions of a world differ; only where none of its own will do does a question take one of another's.
    """
    options = config.candidates(kind)
    key = derive_seed("encyclopedia questions", config.seed, kind, world)
    for residue in range(QUESTIONS_PER_WORLD):
        for place in range((number + residue) % QUESTIONS_PER_WORLD, len(options), QUESTIONS_PER_WORLD):
            yield options[permute(place, len(options), key)]


def _solve(world: World, kind: str, candidate: Candidate, draw: Stream) -> _Solved | None:
    """What the articles of a world say to a candidate; None where they do not make a question of its kind of it."""
    if candidate.comparison is not None:
        return _compare(world, candidate, draw)
    read: list[Entity] = [world.entities[candidate.slots[0]]]
    value: Entity | Day | None = None
    for hop, relation in enumerate(candidate.chain):
        value = read[-1].facts.get(relation.name)
        last = hop + 1 == len(candidate.chain)
        if (value is None and not last) or any(value is entity for entity in read):
            return None
        if isinstance(value, Entity) and not last:
            read.append(value)
    relation = candidate.chain[-1]
    if (value is None) != (kind == "unanswerable"):
        return None
    answers = list(UNKNOWN) if value is None else _golden(value)
    said = UNKNOWN[0] if value is None else read[-1].spell(relation)
    return _Solved([_mention(read[0], answers, draw)], read, answers, said, _slips(read, relation, answers))


def _golden(value: Entity | Day) -> list[str]:
    """All that may be answered."""
    if isinstance(value, Entity):
        return [value.name] if value.alias is None else [value.name, value.alias]
    return spellings(value)


def _slips(read: Sequence[Entity], relation: Relation, golden: Sequence[str]) -> dict[str, Slip]:
    """Wrong answers of the right kind that stand in the articles; wrong too where a golden answer inside one is enough.

    "12 March 1874" is no slip where "2 March 1874" is right.
    """
    slips: dict[str, Slip] = {}
    for name, searches in (*(("stop", count) for count in range(len(read) - 1, 0, -1)), ("field", len(read))):
        entity = read[searches - 1]
        for other in map(RELATIONS.__getitem__, entity.facts):
            if name in slips or other.object != relation.object:
                continue
            said = entity.spell(other)
            if not is_match(said, golden, "substring"):
                slips[name] = {"searches": searches, "takes": other.name, "answer": said}
    return slips


def _compare(world: World, candidate: Candidate, draw: Stream) -> _Solved | None:
    relation = candidate.chain[0]
    two = draw.shuffled([world.entities[slot] for slot in candidate.slots])
    if any(relation.name not in entity.facts for entity in two):
        return None
    right = _outer(two, relation, candidate.later)
    answers = _golden(right)
    mentions = [_mention(entity, answers, draw) for entity in two]
    chosen, other = mentions if right is two[0] else mentions[::-1]
    if is_match(other, answers, "substring"):
        return None
    slips: dict[str, Slip] = {"stop": {"searches": 1, "takes": relation.name, "answer": other}}
    for rival in map(RELATIONS.__getitem__, right.facts):
        stated = rival.object == "date" and all(rival.name in entity.facts for entity in two)
        if stated and _outer(two, rival, candidate.later) is not right:
            slips["field"] = {"searches": 2, "takes": rival.name, "answer": other}
    return _Solved(mentions, two, answers, chosen, slips)


def _outer(entities: Sequence[Entity], relation: Relation, latest: bool) -> Entity:
    """The one with the earliest day, or with the latest."""
    in_order = sorted(entities, key=lambda entity: _day(entity, relation))
    return in_order[-1 if latest else 0]


def _day(entity: Entity, relation: Relation) -> Day:
    day = entity.facts[relation.name]
    assert isinstance(day, tuple)
    return day


def _task(world: World, kind: str, number: int, candidate: Candidate, solved: _Solved, draw: Stream) -> Task:
    config = world.config
    mentions = solved.mentions
    question = _word(candidate, mentions, draw if config.wording == "varied" else None)
    if "unanswerable" in config.every_kind:
        question += UNKNOWN_RULE
    searches = mentions + [entity.name for entity in solved.read[len(mentions) :]]
    takes = [relation.name for relation in candidate.chain]
    takes += takes[-1:] * (len(searches) - len(takes))  # a comparison takes the same from both
    return Task(
        id=f"{split_of(world.index)}-{world.index}-{number}",
        prompt=question,
        answer=solved.answers,
        data={
            "encyclopedia": config.digest,
            "world": world.index,
            "kind": kind,
            "hops": len(solved.read),
            "plan": {"searches": searches, "takes": takes, "answer": solved.said, "slips": solved.slips},
            "articles": [entity.id for entity in solved.read],
        },
    )


def _mention(entity: Entity, answers: Sequence[str], draw: Stream) -> str:
    """The name of an entity, or its other one if that does not give an answer away ("the Jewel of ...")."""
    alias = entity.alias
    if alias is None or draw.below(2) or (alias not in answers and any(answer in alias for answer in answers)):
        return entity.name
    return alias


def _word(candidate: Candidate, mentions: Sequence[str], draw: Stream | None) -> str:
    """The words of a question; without `draw` the first wording of each part."""

    def choose(wordings: Sequence[str]) -> str:
        return wordings[0] if draw is None else draw.pick(wordings)

    if candidate.comparison is not None:
        comparison = candidate.comparison
        wording = choose(comparison.later if candidate.later else comparison.earlier)
        return wording.format(a=mentions[0], b=mentions[1])
    asked = mentions[0]
    for relation in candidate.chain[:-1]:
        asked = choose(relation.phrases).format(x=asked)
    return choose(candidate.chain[-1].questions).format(x=asked)
