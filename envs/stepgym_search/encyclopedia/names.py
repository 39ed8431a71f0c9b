"""Names made of syllables: a permutation takes each entity's number to a name that nobody else has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from stepgym.seeds import derive_seed
from stepgym_search.encyclopedia.draws import permute

NameStyle: TypeAlias = Literal["full", "short"]

# One consonant and one vowel each, so that the pattern of consonants and vowels tells the shapes below apart and a
# small tokenizer finds the same pieces everywhere. Left out: what would make stop words or words that hurt.
SYLLABLES = (
    "ba", "be", "bi", "bo", "bu", "da", "de", "di", "do", "du", "ga", "ge", "gi", "gu", "ka", "ke", "ko", "ku", "la",
    "le", "li", "lo", "lu", "ma", "me", "mi", "mo", "mu", "na", "ne", "ni", "no", "nu", "ra", "re", "ri", "ro", "ru",
    "sa", "se", "si", "so", "su", "ta", "te", "ti", "to", "tu", "va", "ve", "vi", "vo", "vu", "za", "ze", "zo", "zu",
    "fa", "fe", "pa", "pi", "po", "ha", "hi",
)  # fmt: skip
CLOSERS = ("l", "m", "n", "r")
OPENERS = ("e", "i", "o", "u")

_DIGITS = {"S": SYLLABLES, "c": CLOSERS, "o": OPENERS}

ORGANISATION_NOUNS = (
    "Academy", "Bank", "College", "Company", "Foundry", "Guild", "Hospital", "Institute", "Laboratory", "Library",
    "Museum", "Observatory", "Orchestra", "Press", "School", "Theatre",
)  # fmt: skip
REGION_NOUNS = (
    "Basin", "Coast", "Downs", "Fells", "Forest", "Heath", "Highlands", "Hills", "Lowlands", "March", "Marshes",
    "Moors", "Peninsula", "Plain", "Shore", "Vale",
)  # fmt: skip
TITLES = (
    "The Song of {}", "The House of {}", "Letters to {}", "Winter in {}", "The Road to {}", "The Bells of {}",
    "A Night in {}", "The Garden of {}", "The Return of {}", "Farewell to {}", "The Mirror of {}", "Beyond {}",
    "The Children of {}", "Voyage to {}", "The Secret of {}", "The Winds of {}", "Under {}", "The Lamps of {}",
    "The Judge of {}", "The Fall of {}", "Return from {}", "The Gates of {}", "The Weaver of {}", "Silence in {}",
    "The Ruins of {}", "The Wolves of {}", "Waiting for {}", "The Promise of {}", "The Harvest of {}", "Rain over {}",
    "The Crown of {}", "The Keeper of {}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a name: either words of a shape, `count` of them, or `fixed` ones.

    A shape is read letter by letter: S is a syllable, c a closing consonant, o an opening vowel.
    """

    shape: str = ""
    count: int = 0
    fixed: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.fixed) or self.count


@dataclass(frozen=True, slots=True)
class NameSpace:
    """All names of one class: every combination of its parts, `pattern` joins them.

    The last part is the one in which homonyms differ; it has an even number of words.
    """

    label: str
    parts: tuple[Part, ...]
    join: Callable[..., str]

    @property
    def size(self) -> int:
        """How many names there are."""
        size = 1
        for part in self.parts:
            size *= part.size
        return size


def _together(*syllables: str) -> str:
    return "".join(syllables).capitalize()


FULL_SPACES = {
    "person": NameSpace("person", (Part("SSc", 4096), Part("SS", 1024)), lambda family, given: f"{given} {family}"),
    "town": NameSpace("town", (Part("SSS", 8192), Part("Sc", 128)), lambda word, first: f"{first} {word}"),
    "region": NameSpace("region", (Part("SSSc", 8192), Part(fixed=REGION_NOUNS)), lambda word, noun: f"{word} {noun}"),
    "organisation": NameSpace(
        "organisation", (Part("ScS", 16384), Part(fixed=ORGANISATION_NOUNS)), lambda word, noun: f"{word} {noun}"
    ),
    "work": NameSpace("work", (Part("ScSc", 8192), Part(fixed=TITLES)), lambda word, title: title.format(word)),
}
"""The names of each class, of two words or more; all of them together use some fifty thousand words."""

SHORT_SPACES = (
    NameSpace("short", (Part("Sc", 128),) * 2, _together),
    NameSpace("longer", (Part("Sc", 128),) * 3, _together),
)
"""One word for everything: two closed syllables while they last, then three.

Few syllables that come often, each a token for a small tokenizer: a small model learns to copy them soonest.
"""

FULL_ALIASES = NameSpace("alias", (Part("oSS", 8192), Part("oS", 128)), lambda word, first: f"{first} {word}")
SHORT_ALIASES = NameSpace("short alias", (Part("oSSS", 4 * 64**3),), _together)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an encyclopedia.

    Attributes:
        seed: Of the encyclopedia.
        style: `full` (two words or more, by class) or `short` (one word each).
        homonyms: Whether names come in pairs that share a family name, or all but the last word or syllable.
    """

    seed: int
    style: NameStyle
    homonyms: bool

    def name(self, category: str, number: int, overall: int) -> str:
        """The name of an entity.

        Args:
            category: Its class (person, town, region, organisation, work).
            number: Its number among those of its class.
            overall: Its number among all entities.
        """
        if self.style == "full":
            return self._at(FULL_SPACES[category], number, self.homonyms)
        for space in SHORT_SPACES:
            if overall < space.size:
                return self._at(space, overall, self.homonyms)
            overall -= space.size
        raise AssertionError("there are more names than the largest encyclopedia has entities")

    def alias(self, overall: int) -> str:
        """Another name for the entity of that number; it begins with a vowel, which no other name does."""
        return self._at(FULL_ALIASES if self.style == "full" else SHORT_ALIASES, overall, homonyms=False)

    def _at(self, space: NameSpace, number: int, homonyms: bool) -> str:
        key = _key(self.seed, space.label)
        if homonyms:
            index = 2 * permute(number >> 1, space.size >> 1, key) + (number & 1)
        else:
            index = permute(number, space.size, key)
        words = []
        for part in reversed(space.parts):
            index, digit = divmod(index, part.size)
            words.append(part.fixed[digit] if part.fixed else _word(self.seed, part.shape, digit, part.count))
        return space.join(*reversed(words))


@lru_cache(maxsize=1024)
def _key(seed: int, label: str) -> int:
    return derive_seed("encyclopedia names", seed, label)


@lru_cache(maxsize=1 << 16)
def _word(seed: int, shape: str, number: int, count: int) -> str:
    """Word `number` of the `count` that a seed chooses from all of a shape; all of them are kept in order."""
    size = 1
    for letter in shape:
        size *= len(_DIGITS[letter])
    # Where every word is used there is nothing to choose, and homonyms stay neighbours.
    index = number if count == size else permute(number, size, _key(seed, shape))
    letters = []
    for letter in reversed(shape):
        index, digit = divmod(index, len(_DIGITS[letter]))
        letters.append(_DIGITS[letter][digit])
    return "".join(reversed(letters)).capitalize()
