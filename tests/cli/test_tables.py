from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from stepgym.cli.tables import comparison_table, evaluation_table
from stepgym.record.outcome import Outcome
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.comparison import compare
from stepgym.run.statistics import Evaluation, summarize


def shown(table: Table) -> str:
    console = Console(file=StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def evaluation(solved: int, tasks: int, samples: int = 1, **options: Any) -> Evaluation:
    return summarize(
        [
            Trajectory(
                id=TrajectoryId("eval", 0, str(task), sample),
                outcome=Outcome.COMPLETED,
                reward=float(task < solved),
                success=task < solved,
            )
            for task in range(tasks)
            for sample in range(samples)
        ],
        **options,
    )


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_an_evaluation_shows_its_numbers_and_intervals() -> None:
    result = evaluation(15, 20, samples=3, wall_s=1234.56)
    text = shown(evaluation_table(result, title="sql, tiny"))
    assert "sql, tiny" in text
    assert "75.0 %" in row(text, "success")
    assert result.success_ci95 is not None
    assert f"{100 * result.success_ci95[0]:.1f} % to {100 * result.success_ci95[1]:.1f} %" in row(text, "success")
    assert "0.750" in row(text, "mean reward")
    assert [f"pass@{k}" in text for k in (1, 2, 3)] == [True, True, True]
    assert "completed 60" in row(text, "outcomes")
    assert "1,234.6 s" in row(text, "wall time")
    assert "INCOMPLETE" not in text
    assert "not counted" not in text


def test_pass_at_k_shows_powers_of_two_and_the_largest_k() -> None:
    text = shown(evaluation_table(evaluation(1, 2, samples=6)))
    assert [k for k in range(1, 7) if f"pass@{k} " in text] == [1, 2, 4, 6]


def test_an_incomplete_evaluation_says_so_and_why() -> None:
    text = shown(evaluation_table(evaluation(1, 3, expected=5)))
    assert "INCOMPLETE: 2 of 5 episodes failed or are missing" in text
    assert "missing 2" in row(text, "not counted")


def test_unscorable_tasks_are_named() -> None:
    detail = "unscorable task: no rows"
    trajectories = [
        Trajectory(id=TrajectoryId("eval", 0, f"u{i}", 0), outcome=Outcome.ENV_ERROR, outcome_detail=detail)
        for i in range(7)
    ]
    text = shown(evaluation_table(summarize(trajectories)))
    assert "u0, u1, u2, u3, u4 and 2 more" in row(text, "unscorable tasks")
    assert "INCOMPLETE" not in text


def test_nothing_scored_shows_dashes() -> None:
    text = shown(evaluation_table(summarize([])))
    assert "–" in row(text, "success")
    assert "nan" not in text.lower()


def test_a_comparison_shows_both_sides_and_the_verdict() -> None:
    text = shown(comparison_table(compare(evaluation(2, 20), evaluation(15, 18)), a="runs/before", b="runs/after"))
    assert "A: runs/before" in text
    assert "B: runs/after" in text
    assert "+72.2 %" in row(text, "success")
    assert "B solves 72.2 points more than A on the 18 tasks that both have: larger than chance" in " ".join(
        text.split()
    )
    assert "only in A 2" in text
    assert "INCOMPLETE" not in text


def test_a_comparison_fits_a_terminal_of_eighty_columns() -> None:
    table = comparison_table(compare(evaluation(2, 200), evaluation(150, 200)), a="runs/a", b="runs/b")
    console = Console(file=StringIO(), width=80)
    assert console.measure(table).minimum <= console.measure(table).maximum <= 80
