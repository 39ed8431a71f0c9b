"""The curve is drawn whatever was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from stepgym.train.curve import draw_curve

FULL: list[dict[str, Any]] = [
    {"iteration": 0, "warm_start": {"loss": 1.0}},
    *(
        {
            "iteration": number,
            "success": number / 20,
            "validation_success": number / 25 if number % 5 == 0 else None,
            "reward_mean": number / 20,
            "turns_mean": 3.0,
            "response_tokens_mean": 40.0 + number,
            "entropy": float("nan") if number % 3 else 0.1,
        }
        for number in range(1, 21)
    ),
]


@pytest.mark.parametrize(
    ("rows", "before", "after", "height"),
    [
        (FULL, 0.1, 0.9, 720),
        ([*FULL, {"iteration": 21, "success": 0.0, "alarm/reward_falls": 1}], None, 0.9, 720),
        ([{"iteration": 1, "success": 0.5, "turns_mean": 2.0}], 0.1, None, 480),  # no curve from one point
        ([], None, None, 480),
    ],
)
def test_a_picture_is_written(
    tmp_path: Path, rows: list[dict[str, Any]], before: float | None, after: float | None, height: int
) -> None:
    draw_curve(tmp_path / "curve.png", rows, before, after)
    picture = matplotlib.image.imread(tmp_path / "curve.png")
    assert picture.shape[:2] == (height, 840)
    assert picture[..., :3].std() > 0.01  # something is drawn
