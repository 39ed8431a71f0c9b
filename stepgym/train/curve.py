"""The learning curve of a run as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("reward_mean", "reward"),
    ("turns_mean", "turns an episode"),
    ("response_tokens_mean", "tokens a response"),
    ("entropy", "entropy (nats)"),
)
"""What the small panels show, below success: a metric and what it is called."""


def draw_curve(path: Path, metrics: Sequence[Mapping[str, Any]], before: float | None, after: float | None) -> None:
    """Write a PNG: success over the iterations in training and validation, and on the test split before and after.

    Below it in small: reward, turns, response length and entropy, those of them that were measured. A dashed line is
    where an alarm was raised.

    Args:
        path: The file.
        metrics: Rows of `metrics.jsonl`.
        before, after: Success on the test split; None where it was not measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in metrics if row.get("iteration", 0) > 0]
    panels = [(name, label) for name, label in PANELS if len(_points(rows, name)) > 1]
    alarms = sorted({row["iteration"] for row in rows if any(name.startswith("alarm/") for name in row)})
    figure = Figure(figsize=(7, 6 if panels else 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    large, *small = [figure.subplots()] if not panels else _axes(figure, len(panels))
    for name, label, marker in (("success", "training tasks, sampled", ""), ("validation_success", "validation", "o")):
        points = _points(rows, name)
        if points:
            large.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4, linewidth=1.2)
    last = rows[-1]["iteration"] if rows else 0
    for value, at, label in ((before, 0, "test split, before"), (after, last, "test split, after")):
        if value is not None:
            large.scatter([at], [value], zorder=3, s=45, marker="D", label=f"{label}: {value:.2f}")
    large.set(xlabel="iteration", ylabel="success", ylim=(-0.02, 1.02), title="Success")
    for axes, (name, label) in zip(small, panels, strict=True):
        axes.plot(*zip(*_points(rows, name), strict=True), linewidth=1.0, color="tab:gray")
        axes.set_title(label, fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in (large, *small):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        for place, iteration in enumerate(alarms):
            told = {"label": "alarm"} if axes is large and place == 0 else {}
            axes.axvline(iteration, color="tab:red", linestyle="--", linewidth=0.8, alpha=0.6, **told)
    if large.get_legend_handles_labels()[0]:
        large.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


def _axes(figure: Any, count: int) -> list[Any]:
    """One wide plot above, `count` small ones below."""
    grid = figure.add_gridspec(2, count, height_ratios=(3, 1))
    return [figure.add_subplot(grid[0, :]), *(figure.add_subplot(grid[1, column]) for column in range(count))]


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["iteration"], row[name]) for row in rows if _is_number(row.get(name))]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
