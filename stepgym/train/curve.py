"""The learning curve of a run as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curve(path: Path, metrics: Sequence[Mapping[str, Any]], before: float | None, after: float | None) -> None:
    """Write a PNG: success over the iterations in training and validation, and on the test split before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in metrics if row.get("iteration", 0) > 0]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label, marker in (("success", "training tasks, sampled", ""), ("validation_success", "validation", "o")):
        points = [(row["iteration"], row[name]) for row in rows if _is_number(row.get(name))]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4, linewidth=1.2)
    last = rows[-1]["iteration"] if rows else 0
    for value, at, label in ((before, 0, "test split, before"), (after, last, "test split, after")):
        if value is not None:
            axes.scatter([at], [value], zorder=3, s=45, marker="D", label=f"{label}: {value:.2f}")
    axes.set(xlabel="iteration", ylabel="success", ylim=(-0.02, 1.02), title="Success")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
