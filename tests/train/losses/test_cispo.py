from __future__ import annotations

import math
from typing import Any

import pytest

from stepgym.train.losses.cispo import cispo


def test_cispo_by_hand(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1.1, 3.0, 0.2, 1.1, 3.0], [2.0, 2.0, 2.0, -1.0, -1.0])
    loss = cispo(tokens, clip_low=0.5, clip_high=1.0)  # weights 1.1, 2, 0.5, 1.1, 2
    logprob = [-1 + math.log(ratio) for ratio in (1.1, 3.0, 0.2, 1.1, 3.0)]
    weights = [1.1, 2.0, 0.5, 1.1, 2.0]
    advantage = [2.0, 2.0, 2.0, -1.0, -1.0]
    expected = [-w * a * value for w, a, value in zip(weights, advantage, logprob, strict=True)]
    assert loss.values.tolist() == pytest.approx(expected)
    # No token loses its gradient: it is -weight * A everywhere, clipped or not.
    assert slopes(tokens, loss) == pytest.approx([-2.2, -4.0, -1.0, 1.1, 2.0])
    assert loss.metrics["clip_fraction_high"].tolist() == [False, True, False, False, True]
    assert loss.metrics["clip_fraction_low"].tolist() == [False, False, True, False, False]


def test_by_default_there_is_no_lower_bound_and_an_upper_one_of_five(tokens_of: Any, slopes: Any) -> None:
    tokens = tokens_of([1e-3, 4.9, 5.1], [1.0, 1.0, 1.0])
    assert slopes(tokens, cispo(tokens)) == pytest.approx([-1e-3, -4.9, -5.0])
    assert not cispo(tokens).metrics["clip_fraction_low"].any()
