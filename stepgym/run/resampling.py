"""The numerical side of evaluation: pass@k, bootstrap intervals and a paired permutation test, all over tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Interval: TypeAlias = tuple[float, float]

EXACT_PAIRS = 14
"""Up to this many pairs that differ, the permutation test counts every one of the 2**n sign patterns."""

_CHUNK = 4_000_000  # numbers drawn at a time, so that memory does not grow with tasks times resamples
_Z95 = 1.959963984540054


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Chance that at least one of `k` draws, without replacement, of `samples` is among the `successes`.

    The unbiased estimator of pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1). Raises `ValueError` unless 0 <= successes <= samples and 1 <= k <= samples.
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} is not defined for {successes} successes in {samples} samples")
    return float(_pass_table(np.array([samples]), np.array([successes]))[0, k - 1])


def pass_at_all(samples: NDArray[np.int64], successes: NDArray[np.int64]) -> tuple[dict[int, float], dict[int, int]]:
    """pass@k for every k up to the largest number of samples, and the number of tasks each is averaged over.

    Args:
        samples: Scored episodes per task, integers [tasks], each 1 or more.
        successes: How many of them succeeded, integers [tasks].

    Returns:
        `{k: mean over the tasks with at least k samples}` and `{k: number of those tasks}`.
    """
    if len(samples) == 0:
        return {}, {}
    table = _pass_table(samples, successes)
    defined = samples[:, None] > np.arange(table.shape[1])
    tasks = defined.sum(axis=0)
    means = np.where(defined, table, 0.0).sum(axis=0) / tasks
    ks = range(1, table.shape[1] + 1)
    return dict(zip(ks, means.tolist(), strict=True)), dict(zip(ks, tasks.tolist(), strict=True))


def _pass_table(samples: NDArray[np.int64], successes: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [tasks, k]: pass@k per task, as 1 minus a running product, which neither overflows nor cancels."""
    drawn = np.arange(int(samples.max()))
    left = np.maximum(samples[:, None] - drawn, 1)
    failed_left = np.maximum(samples[:, None] - successes[:, None] - drawn, 0)
    return 1.0 - np.cumprod(failed_left / left, axis=1)


def bootstrap_interval(
    values: NDArray[np.float64], *, bounds: Interval, seed: int = 0, resamples: int = 10_000
) -> Interval | None:
    """95 % interval of the mean of `values`, one value per task, by resampling tasks with replacement.

    Percentile bootstrap (Efron 1979) with two repairs. The resampled means are spread by sqrt(n / (n - 1)), as the
    bootstrap of n values is too narrow by that factor (Hesterberg 2015, "What Teachers Should Know about the
    Bootstrap"). And where every value lies at the same end of `bounds` (no task solved, or all of them), resampling
    would claim certainty: the interval is then Wilson's (1927) for n of n.

    Args:
        values: float64 [tasks].
        bounds: (low, high) that no mean can leave.
        seed: Equal seeds and values give equal intervals.
        resamples: Number of resamples.

    Returns:
        (low, high), or None with fewer than two tasks: one task says nothing about others.
    """
    count = len(values)
    if count < 2:
        return None
    low, high = bounds
    if np.all(values == values[0]) and values[0] in (low, high):
        reach = (high - low) * _Z95**2 / (count + _Z95**2)
        return (low, low + reach) if values[0] == low else (high - reach, high)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [values[rng.integers(0, count, size=(rows, count))].mean(axis=1) for rows in _chunks(resamples, count)]
    )
    mean = values.mean()
    spread = mean + (means - mean) * np.sqrt(count / (count - 1))
    ends = np.clip(np.quantile(spread, [0.025, 0.975]), min(low, values.min()), max(high, values.max()))
    return float(ends[0]), float(ends[1])


def permutation_p_value(differences: NDArray[np.float64], *, seed: int = 0, permutations: int = 10_000) -> float:
    """Two-sided p-value of paired differences, one per task, under the hypothesis that the two sides are alike.

    If they are, each difference might as well have had the other sign: the p-value is the share of sign patterns whose
    mean is at least as far from 0 as the one seen (Fisher 1935). Exact up to `EXACT_PAIRS` differences that are not 0;
    beyond, by random patterns with the seen one among them, so it is never 0 (Phipson and Smyth 2010).

    Args:
        differences: float64 [tasks].
        seed: Equal seeds and differences give equal p-values.
        permutations: Number of random sign patterns.
    """
    magnitudes = np.abs(differences[differences != 0])
    count = len(magnitudes)
    if count == 0:
        return 1.0
    seen = abs(float(differences.sum())) * (1 - 1e-12)  # patterns as far as the seen one, but for rounding, count
    if count <= EXACT_PAIRS:
        signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        return float(np.mean(np.abs(signs @ magnitudes) >= seen))
    rng = np.random.default_rng(seed)
    extreme = 0
    for rows in _chunks(permutations, count):
        signs = 1.0 - 2.0 * rng.integers(0, 2, size=(rows, count), dtype=np.int8)
        extreme += int(np.sum(np.abs(signs @ magnitudes) >= seen))
    return (extreme + 1) / (permutations + 1)


def _chunks(rows: int, columns: int) -> Iterator[int]:
    """Numbers of rows, each small enough to hold in memory with `columns` columns, that sum to `rows`."""
    size = max(1, _CHUNK // columns)
    for start in range(0, rows, size):
        yield min(size, rows - start)
