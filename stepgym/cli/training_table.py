"""What a training run came to, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from stepgym.cli.progress import short_count
from stepgym.train.result import TrainingResult


def training_table(result: TrainingResult) -> Table:
    """One row per measure: its name, its value, and what there is to know about it."""
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("")
    for name, before, after in (
        ("sampled", result.success_before, result.success_after),
        ("greedy", result.greedy_before, result.greedy_after),
    ):
        if before is not None and after is not None:
            tasks = f"of {result.held_out_tasks} held-out tasks"
            table.add_row(f"success, {name}", f"{before:.3f} -> {after:.3f}", tasks)
    best, iterations = result.best_iteration, result.iterations
    made_in = f"{iterations}" if best == iterations else f"the first {best} of {iterations}"
    table.add_row("updates", str(result.updates), f"in {made_in} iterations; seed {result.seed}")
    counts = ", ".join(f"{name} {count}" for name, count in result.outcomes.items())
    table.add_row("episodes in training", str(sum(result.outcomes.values())), counts)
    _add_tokens(table, result.totals)
    seconds = _phases(result.totals)
    table.add_row("wall time", f"{result.wall_s:,.0f} s", f"in iterations: {seconds}" if seconds else "")
    memory = {
        name.removeprefix("memory_"): value for name, value in result.totals.items() if name.startswith("memory_")
    }
    if "rss_gib" in memory:
        cuda = f"; on the GPU {memory['cuda_gib']:.1f} GiB" if "cuda_gib" in memory else ""
        table.add_row("peak memory", f"{memory['rss_gib']:.1f} GiB", f"resident{cuda}")
    for alarm in result.alarms:
        table.add_row("alarm", f"iteration {alarm.iteration}", alarm.text)
    return table


def _add_tokens(table: Table, totals: Mapping[str, float]) -> None:
    """Tokens that were learned from, and how many of them had to be computed."""
    steps, unique, forward = (totals.get(f"tokens_{name}", 0.0) for name in ("steps", "unique", "forward"))
    if not steps or not forward:
        return
    detail = f"{short_count(unique)} unique, {short_count(forward)} computed: {steps / forward:.1f} for one"
    table.add_row("tokens learned from", short_count(steps), detail)


def _phases(totals: Mapping[str, float]) -> str:
    """Where the time of the iterations went, longest first."""
    found = {name.removeprefix("seconds/"): value for name, value in totals.items() if name.startswith("seconds/")}
    longest = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:,.0f} s" for name, value in longest if value >= 0.5)
