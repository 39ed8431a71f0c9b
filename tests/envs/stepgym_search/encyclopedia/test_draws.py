from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.encyclopedia.draws import Stream, mix, permute


@given(size=st.integers(1, 500), key=st.integers(0, 2**63 - 1))
def test_a_permutation_takes_every_number_to_another_one(size: int, key: int) -> None:
    assert sorted(permute(number, size, key) for number in range(size)) == list(range(size))


def test_permutations_with_different_keys_have_little_in_common() -> None:
    size = 10_000
    same = sum(permute(number, size, 1) == permute(number, size, 2) for number in range(size))
    stays = sum(permute(number, size, 1) == number for number in range(size))
    neighbours = sum(abs(permute(n, size, 1) - permute(n + 1, size, 1)) == 1 for n in range(size - 1))
    assert max(same, stays, neighbours) < 20


def test_the_output_function_is_that_of_splitmix64() -> None:
    # The first outputs of the published generator when it is seeded with 1234567.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_streams_depend_on_all_of_their_parts_and_on_nothing_else() -> None:
    def first(*parts: object) -> list[int]:
        stream = Stream(*parts)
        return [stream.below(1000) for _ in range(5)]

    assert first(0, "world", 3) == first(0, "world", 3) == first("0", "world", "3")
    assert len({tuple(first(*parts)) for parts in [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1)]}) == 4


def test_draws_are_even() -> None:
    stream = Stream("even")
    counts = Counter(stream.below(7) for _ in range(70_000))
    assert set(counts) == set(range(7))
    assert all(abs(count - 10_000) < 500 for count in counts.values())


@given(st.lists(st.integers()), st.integers())
def test_a_shuffle_keeps_all_there_is(options: list[int], seed: int) -> None:
    assert sorted(Stream(seed).shuffled(options)) == sorted(options)


@pytest.mark.parametrize("length", [2, 5])
def test_every_order_comes_up(length: int) -> None:
    orders = {tuple(Stream(seed).shuffled(range(length))) for seed in range(2_000)}
    assert len(orders) == {2: 2, 5: 120}[length]
