from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.encyclopedia.splits import SPLITS, split_of, world_of, worlds_in


@given(st.integers(10, 3_000))
def test_the_splits_share_out_the_worlds(worlds: int) -> None:
    parts = {split: [world_of(split, number) for number in range(worlds_in(split, worlds))] for split in SPLITS}
    assert sorted(chain.from_iterable(parts.values())) == list(range(worlds))
    assert all(split_of(world) == split for split, members in parts.items() for world in members)
    assert all(members == sorted(members) for members in parts.values())


@given(st.integers(1, 50_000).map(lambda blocks: 10 * blocks))
def test_one_world_in_ten_is_for_the_test_and_one_for_validation(worlds: int) -> None:
    assert [worlds_in(split, worlds) for split in SPLITS] == [worlds * 8 // 10, worlds // 10, worlds // 10]


def test_where_the_held_out_worlds_lie_follows_no_pattern() -> None:
    places = {split: {world_of(split, number) % 10 for number in range(200)} for split in ("validation", "test")}
    assert places == {"validation": set(range(10)), "test": set(range(10))}
