"""Which questions could be asked of a world, before it is known what its articles leave out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from stepgym_search.encyclopedia.categories import SLOTS
from stepgym_search.encyclopedia.relations import COMPARISONS, RELATIONS, Comparison, Relation

KINDS = ("one_hop", "two_hop", "three_hop", "date", "comparison", "unanswerable")
"""The kinds of questions: what one, two or three articles say; a day; which of two came first; what no article says."""

_MOST_HOPS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A question without its words.

    Attributes:
        slots: What it starts from: one entity, or the two that are compared.
        chain: The relations that lead from the entity to the answer; for a comparison the one that decides.
        comparison: How the two are compared.
        later: Whether a comparison asks for the one with the later day.
    """

    slots: tuple[int, ...]
    chain: tuple[Relation, ...]
    comparison: Comparison | None = None
    later: bool = False


@lru_cache(maxsize=256)
def candidates(kind: str, asked: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Everything of a kind that could be asked of a world about the relations named in `asked`."""
    relations = [relation for name, relation in RELATIONS.items() if name in asked]
    if kind == "comparison":
        return tuple(_comparisons(relations))
    chains: dict[int, list[tuple[Relation, ...]]] = {1: [(relation,) for relation in relations]}
    for hops in range(2, _MOST_HOPS + 1):
        chains[hops] = [(*c, r) for c in chains[hops - 1] for r in relations if c[-1].object == r.subject]
    if kind in ("date", "unanswerable"):
        chosen = chains[1] + chains[2]
    else:
        chosen = chains[{"one_hop": 1, "two_hop": 2, "three_hop": 3}[kind]]
    if kind == "unanswerable":
        chosen = [chain for chain in chosen if chain[-1].gaps and chain[-1].subject != "region"]
    else:
        chosen = [chain for chain in chosen if (chain[-1].object == "date") == (kind == "date")]
    return tuple(Candidate((slot,), chain) for chain in chosen for slot in SLOTS[chain[0].subject])


def _comparisons(relations: list[Relation]) -> Iterator[Candidate]:
    for comparison in COMPARISONS:
        relation = RELATIONS[comparison.relation]
        if relation in relations:
            for pair in combinations(SLOTS[relation.subject], 2):
                yield from (Candidate(pair, (relation,), comparison, later) for later in (False, True))
