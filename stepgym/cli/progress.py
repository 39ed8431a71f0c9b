"""Live progress on stderr: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stepgym.record.trajectory import Trajectory
from stepgym.run.tally import Tally
from stepgym.train.observer import Observer

PLAIN_SECONDS = 15.0
"""Where there is no terminal, a stage that lasts reports this often."""


class ProgressDisplay(Observer):
    """Shows stages as a bar with the latest numbers beside it, and iterations as lines. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._live = self.console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self._live,
            transient=True,
        )
        self._task: Any = None
        self._stage = ""
        self._total: int | None = None
        self._told = 0.0

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def stage(self, name: str, total: int | None) -> None:
        """Begin a new bar."""
        self._stage, self._total, self._told = name, total, time.monotonic()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, numbers="")

    def advance(self, done: int, numbers: Mapping[str, float]) -> None:
        """Move the bar."""
        shown = "  ".join(_shown(name, value) for name, value in numbers.items() if name in _LABELS)
        if self._live:
            self._progress.update(self._task, completed=done, numbers=shown)
        elif time.monotonic() - self._told > PLAIN_SECONDS:
            self._told = time.monotonic()
            self.note(f"{self._stage}: {done}{'' if self._total is None else f' of {self._total}'}  {shown}")

    def doing(self, text: str) -> None:
        """Show beside the bar what is waited for."""
        if self._live:
            if self._task is not None:
                self._progress.update(self._task, numbers=escape(text))  # a log's line may look like markup
        elif time.monotonic() - self._told > PLAIN_SECONDS:
            self._told = time.monotonic()
            self.note(f"{self._stage}: {text}")

    def iteration(self, number: int, metrics: Mapping[str, Any]) -> None:
        """Print a line about an iteration."""
        self.note(iteration_line(number, metrics))

    def alarm(self, name: str, text: str) -> None:
        """Print an alarm so that it is seen."""
        self.console.print(f"alarm: {text}", markup=False, soft_wrap=True, style="yellow")


def iteration_line(number: int, metrics: Mapping[str, Any]) -> str:
    """An iteration in a line: how it went, how many tokens were computed for how many learned from, and the time."""
    shown = [_shown(name, metrics[name]) for name in _ITERATION if _is_number(metrics.get(name))]
    if metrics.get("tokens_steps"):
        shown.append(f"{short_count(metrics['tokens_forward'])} of {short_count(metrics['tokens_steps'])} tokens")
    if _is_number(metrics.get("iteration_s")):
        phases = [
            f"{name} {metrics[f'seconds/{name}']:.1f}"
            for name in ("rollout", "update", "evaluation")
            if _is_number(metrics.get(f"seconds/{name}"))
        ]
        shown.append(f"{metrics['iteration_s']:.1f} s" + (f" ({', '.join(phases)})" if phases else ""))
    return f"iteration {number:>4}  {'  '.join(shown)}"


def short_count(number: float) -> str:
    """`950`, `12.3k`, `4.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


_LABELS = {
    "reward": "reward {:.2f}",
    "success": "success {:.2f}",
    "turns": "turns {:.1f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "not_completed": "{:.0f} not completed",
    "loss": "loss {:.3f}",
    "accuracy": "accuracy {:.3f}",
    "reward_mean": "reward {:+.2f}",
    "turns_mean": "turns {:.1f}",
    "response_tokens_mean": "response {:.0f}",
    "entropy": "entropy {:.2f}",
    "logprob_gap_mean": "gap {:.1e}",
    "grad_norm": "gradient {:.2f}",
    "validation_success": "validation {:.2f}",
}
_ITERATION = (
    "reward_mean",
    "success",
    "validation_success",
    "turns_mean",
    "response_tokens_mean",
    "entropy",
    "logprob_gap_mean",
    "grad_norm",
)


def _shown(name: str, value: float) -> str:
    return _LABELS[name].format(value) if _is_number(value) else ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


class EpisodeProgress:
    """Feeds the running totals of a rollout to a display; call it with each trajectory."""

    def __init__(self, display: Observer, tally: Tally, total: int, *, name: str = "episodes") -> None:
        self._display = display
        self._tally = tally
        display.stage(name, total)

    def __call__(self, trajectory: Trajectory) -> None:
        """An episode has ended."""
        tally = self._tally
        self._display.advance(
            tally.episodes,
            {
                "reward": tally.mean_reward,
                "success": tally.success,
                "turns": tally.turns / max(1, tally.attempts),
                "tokens_per_second": tally.tokens_per_second,
                "not_completed": tally.episodes - tally.outcomes["completed"],
            },
        )


def outcome_lines(tally: Tally) -> list[str]:
    """How a rollout's episodes ended, and what looks suspect, as lines for people."""
    counts = ", ".join(f"{name} {count}" for name, count in tally.outcomes.most_common())
    lines = [f"outcomes: {counts or 'none'}"]
    lines += [f"suspect: {line}" for line in tally.suspects[:5]]
    if len(tally.suspects) > 5:
        lines.append(f"and {len(tally.suspects) - 5} more suspects")
    return lines
