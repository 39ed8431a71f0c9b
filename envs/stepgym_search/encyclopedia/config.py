"""What an encyclopedia and its questions are drawn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from stepgym.errors import UserError
from stepgym_search.encyclopedia.candidates import KINDS, Candidate, candidates
from stepgym_search.encyclopedia.categories import WORLD_SIZE, Category
from stepgym_search.encyclopedia.names import Names, NameStyle
from stepgym_search.encyclopedia.relations import RELATIONS, Relation, stated_relations

Wording: TypeAlias = Literal["plain", "varied"]

SMALLEST, LARGEST = 200, 1_000_000
_FACTS_PER_SENTENCE = 2
# Part of every digest: a later version of this code that writes other texts must raise it.
_VERSION = 4


@dataclass(frozen=True)
class EncyclopediaConfig:
    """A fictional encyclopedia and the questions about it. The same config gives the same texts everywhere.

    Attributes:
        seed: Everything follows from it.
        articles: How many, a multiple of 20: worlds are whole. World `i` is the same in every larger encyclopedia.
        kinds: Kinds of questions, out of `KINDS`; None takes all that the encyclopedia allows.
        wording: `plain` says each thing in one way only, `varied` in several, in a varying order.
        names: `full` (two words or more; tens of thousands of words in a million articles) or `short` (one word).
        distractors: 0: an article states at most one thing of a kind. 1: it also states others of the same kind, such
            as the town of the grave beside the birthplace. 2: names also come in pairs that are easily confused.
            3: each article also mentions another entity in a sentence that tells nothing.
        aliases: Whether about half of the entities have another name, which their article tells; questions may use
            it, and an answer may give it.
        sentences: Sentences in each article, from 1 to 8, each with at most two facts. Facts that find no room are not
            stated; room without facts is filled with sentences that tell nothing. `distractors: 3` adds one more.
        gaps: Whether some articles leave out a fact that others of their class state. Needed for `unanswerable`.
        relations: Names of the relations that articles state; None is all of them. See `RELATIONS`.
        asked: Those of them that questions ask for or pass through; None is all that are stated.

    Raises `UserError` for a name that does not exist, a number out of range, or kinds that cannot be asked.
    """

    seed: int = 0
    articles: int = 2000
    kinds: tuple[str, ...] | None = None
    wording: Wording = "varied"
    names: NameStyle = "full"
    distractors: int = 1
    aliases: bool = True
    sentences: int = 4
    gaps: bool = True
    relations: tuple[str, ...] | None = None
    asked: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("kinds", "relations", "asked"):
            value = getattr(self, name)
            if value is not None:
                known = KINDS if name == "kinds" else tuple(RELATIONS)
                object.__setattr__(self, name, _checked_names(name, value, known))
        for name, options in (("wording", get_args(Wording)), ("names", get_args(NameStyle))):
            _checked_names(name, (getattr(self, name),), options)
        for name, low, high in (("articles", SMALLEST, LARGEST), ("distractors", 0, 3), ("sentences", 1, 8)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise UserError(f"search: {name} must be a whole number from {low:,} to {high:,}, not {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UserError(f"search: seed must be a whole number, not {self.seed!r}")
        if self.articles % WORLD_SIZE:
            nearest = round(self.articles / WORLD_SIZE) * WORLD_SIZE
            raise UserError(f"search: articles must be a multiple of {WORLD_SIZE}, not {self.articles}; try {nearest}")
        stated = {relation.name for relations in self.stated.values() for relation in relations}
        for name in self.asked or ():
            if name not in stated:
                raise UserError(
                    f"search: asked: no article states {name!r}; add it to relations, or raise sentences or distractors"
                )
        if "unanswerable" in (self.kinds or ()) and not self.gaps:
            raise UserError("search: the kind 'unanswerable' needs gaps: true, articles that leave something out")
        for kind in self.kinds or ():
            if not self.candidates(kind):
                raise UserError(
                    f"search: no question of the kind {kind!r} can be asked of these articles; "
                    "choose other kinds, or more relations or sentences"
                )
        if not self.every_kind:
            raise UserError("search: no question can be asked of these articles; choose more relations")

    @cached_property
    def stated(self) -> dict[Category, tuple[Relation, ...]]:
        """What the articles of each class state, where they leave nothing out."""
        names = tuple(RELATIONS) if self.relations is None else self.relations
        return stated_relations(names, self.distractors, _FACTS_PER_SENTENCE * self.sentences)

    @cached_property
    def every_kind(self) -> tuple[str, ...]:
        """The kinds that are drawn from: those that were chosen, or all that the encyclopedia allows."""
        if self.kinds is not None:
            return self.kinds
        return tuple(kind for kind in KINDS if (kind != "unanswerable" or self.gaps) and self.candidates(kind))

    def candidates(self, kind: str) -> tuple[Candidate, ...]:
        """Every question of a kind, without its words, that could be asked of a world."""
        stated = [relation for kept in self.stated.values() for relation in kept]
        names = tuple(r.name for r in stated if self.asked is None or r.name in self.asked)
        return candidates(kind, names)

    @property
    def worlds(self) -> int:
        """How many worlds the encyclopedia is made of."""
        return self.articles // WORLD_SIZE

    @cached_property
    def name_book(self) -> Names:
        """Where the names come from."""
        return Names(self.seed, self.names, homonyms=self.distractors >= 2)

    def text_settings(self) -> dict[str, Any]:
        """What the texts of the articles depend on, as JSON."""
        stated = {category: [relation.name for relation in kept] for category, kept in self.stated.items()}
        return {
            "version": _VERSION,
            "seed": self.seed,
            "articles": self.articles,
            "wording": self.wording,
            "names": self.names,
            "distractors": self.distractors,
            "aliases": self.aliases,
            "sentences": self.sentences,
            "gaps": self.gaps,
            "stated": stated,
        }

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that name the texts; which questions are asked does not matter."""
        text = json.dumps(self.text_settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checked_names(option: str, given: object, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if not names:
        raise UserError(f"search: {option} must be a list of names, not {given!r}; known: {', '.join(known)}")
    for name in names:
        if name not in known:
            close = get_close_matches(str(name), list(known), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"search: unknown name {name!r} in {option}; {hint}Known: {', '.join(known)}")
    return tuple(dict.fromkeys(names))
