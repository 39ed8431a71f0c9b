from __future__ import annotations

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.run.resampling import (
    EXACT_PAIRS,
    bootstrap_interval,
    pass_at_all,
    pass_at_k,
    permutation_p_value,
)

counts = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def test_pass_at_k_by_hand() -> None:
    # 2 of 4 solve it. Of the 6 pairs one holds no success, of the 4 triples none does.
    assert [pass_at_k(4, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])


@given(counts)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(case: tuple[int, int]) -> None:
    samples, successes = case
    solved = [True] * successes + [False] * (samples - successes)
    for k in range(1, samples + 1):
        subsets = list(combinations(solved, k))
        assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_stays_finite() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(2_000, 3, 1_000) == pytest.approx(1 - comb(1_997, 1_000) / comb(2_000, 1_000))


@pytest.mark.parametrize(("samples", "successes", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_what_it_is_not_defined_for(samples: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, successes, k)


@given(st.lists(counts, min_size=1, max_size=8))
def test_pass_at_all_averages_the_tasks_that_have_enough_samples(cases: list[tuple[int, int]]) -> None:
    samples, successes = (np.array(column, dtype=np.int64) for column in zip(*cases, strict=True))
    means, tasks = pass_at_all(samples, successes)
    assert list(means) == list(range(1, max(samples) + 1))
    for k, mean in means.items():
        enough = [(n, c) for n, c in cases if n >= k]
        assert tasks[k] == len(enough)
        assert mean == pytest.approx(np.mean([pass_at_k(n, c, k) for n, c in enough]))
    if len(set(samples)) == 1:
        assert sorted(means.values()) == pytest.approx(list(means.values()))


def test_pass_at_all_of_nothing_is_empty() -> None:
    assert pass_at_all(np.array([], dtype=np.int64), np.array([], dtype=np.int64)) == ({}, {})


def test_an_interval_needs_two_tasks() -> None:
    assert bootstrap_interval(np.array([]), bounds=(0, 1)) is None
    assert bootstrap_interval(np.array([0.5]), bounds=(0, 1)) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=30), st.integers(0, 2**32))
def test_an_interval_holds_the_mean_within_bounds_and_depends_on_the_seed_alone(eighths: list[int], seed: int) -> None:
    values = np.array(eighths) / 8
    interval = bootstrap_interval(values, bounds=(0, 1), seed=seed, resamples=300)
    assert interval is not None
    low, high = interval
    assert 0 <= low <= values.mean() + 1e-12
    assert values.mean() - 1e-12 <= high <= 1
    assert bootstrap_interval(values, bounds=(0, 1), seed=seed, resamples=300) == interval


def test_the_interval_scales_with_the_values() -> None:
    values = np.array([0.0, 1.0, 1.0, 0.25, 0.5, 1.0])
    low, high = bootstrap_interval(values, bounds=(0, 1)) or (0, 0)
    scaled = bootstrap_interval(2 * values - 1, bounds=(-1, 1))
    assert scaled == pytest.approx((2 * low - 1, 2 * high - 1))


def test_solving_every_task_is_no_certainty() -> None:
    # Wilson's interval for 20 of 20: 20 / (20 + 1.96**2) = 0.8389.
    assert bootstrap_interval(np.ones(20), bounds=(0, 1)) == pytest.approx((0.8389, 1), abs=1e-4)
    assert bootstrap_interval(np.zeros(20), bounds=(0, 1)) == pytest.approx((0, 0.1611), abs=1e-4)
    assert bootstrap_interval(-np.ones(20), bounds=(-1, 1)) == pytest.approx((-1, -0.6777), abs=1e-4)


def test_the_interval_agrees_with_the_normal_one_on_many_tasks() -> None:
    values = np.random.default_rng(1).random(3_000)
    half = 1.96 * values.std(ddof=1) / np.sqrt(3_000)
    assert bootstrap_interval(values, bounds=(0, 1)) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=half / 15
    )


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """400 evaluations of 40 tasks with 4 samples, each task with its own chance of success, 0.5 on average."""
    rng = np.random.default_rng(7)
    covered = 0
    for seed in range(400):
        chances = rng.beta(1, 1, size=40)
        low, high = bootstrap_interval(rng.binomial(4, chances) / 4, bounds=(0, 1), seed=seed, resamples=400) or (0, 0)
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_permutation_p_values_by_hand() -> None:
    assert permutation_p_value(np.array([])) == 1
    assert permutation_p_value(np.zeros(9)) == 1
    assert permutation_p_value(np.ones(5)) == 2 / 32
    assert permutation_p_value(np.ones(6)) == 2 / 64
    # |3 + 2 + 1| needs all signs alike; |3 + 2 - 1| = 4 is reached by ++-, +++ and their mirrors.
    assert permutation_p_value(np.array([3.0, 2.0, -1.0, 0.0])) == 4 / 8


@given(st.lists(st.integers(-4, 4), max_size=8))
def test_small_permutation_tests_are_exact(eighths: list[int]) -> None:
    differences = np.array(eighths, dtype=float) / 8
    seen = abs(sum(eighths))
    patterns = list(product((-1, 1), repeat=len(eighths)))
    as_far = sum(abs(sum(s * d for s, d in zip(signs, eighths, strict=True))) >= seen for signs in patterns)
    assert permutation_p_value(differences) == pytest.approx(as_far / len(patterns))
    assert permutation_p_value(-differences) == pytest.approx(permutation_p_value(differences))


def test_the_random_permutation_test_agrees_with_the_exact_one() -> None:
    # n differences of 1, of which m are negative: a binomial question with an exact answer.
    n, m = 30, 9
    differences = np.array([-1.0] * m + [1.0] * (n - m))
    assert n > EXACT_PAIRS
    exact = 2 * sum(comb(n, i) for i in range(m + 1)) / 2**n
    assert permutation_p_value(differences) == pytest.approx(exact, abs=0.008)
    assert 0 < permutation_p_value(np.ones(60)) < 0.001


def test_the_permutation_test_is_wrong_about_as_rarely_as_it_says() -> None:
    rng = np.random.default_rng(3)
    wrong = 0
    for seed in range(400):
        chances = rng.random(30)
        differences = (rng.binomial(4, chances) - rng.binomial(4, chances)) / 4
        wrong += permutation_p_value(differences, seed=seed, permutations=400) < 0.05
    assert wrong / 400 <= 0.08
