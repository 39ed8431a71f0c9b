"""`stepgym replay RUN`: play the recorded actions again and report where the environment answers differently."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgym.cli.json_output import json_report

if TYPE_CHECKING:
    from rich.table import Table

    from stepgym.inspect.replay import Replay


def replay(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of trajectories.")],
    phase: Annotated[list[str] | None, typer.Option(help="Only this phase, as train; may be repeated.")] = None,
    outcome: Annotated[list[str] | None, typer.Option(help="Only this outcome; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only the task of this id; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many trajectories.")] = None,
    attempts: Annotated[
        bool, typer.Option("--attempts", help="Also attempts that failed, up to their failure, or were repeated.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 16,
    step_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for one call of the environment; by default the run's.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="In place of the recorded environment: an id, a short name, or module:Name.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="How many differences and problems are printed.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Play a run's actions again in fresh environments: exit code 0 when all answer the same, 1 where one does not."""
    from dataclasses import replace

    from rich.console import Console

    from stepgym.cli.progress import ProgressDisplay
    from stepgym.env.shared import close_shared
    from stepgym.inspect.recorded_run import RecordedRun
    from stepgym.inspect.replay import count_replayable, recorded_limits
    from stepgym.inspect.replay import replay as play_again
    from stepgym.inspect.replayed_episode import ReplayedEpisode

    filters = {"phase": phase or None, "outcome": outcome or None, "task": task or None, "limit": limit}
    total = count_replayable(run, attempts=attempts, **filters)
    limits = recorded_limits(RecordedRun.of(run))
    if step_timeout is not None:
        limits = replace(limits, step_timeout=step_timeout)
    done = 0
    with ProgressDisplay() as display:
        display.stage("episodes", total)

        def advance(_: ReplayedEpisode) -> None:
            nonlocal done
            done += 1
            display.advance(done, {})

        try:
            result = play_again(
                run, attempts=attempts, concurrency=concurrency, limits=limits, env=env, on_episode=advance, **filters
            )
        finally:
            close_shared()
    if as_json:
        print(json_report(result.to_dict()))
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(counts_table(result))
        for line in report_lines(result, show):
            console.print(line)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def counts_table(result: Replay) -> Table:
    """How many trajectories were equal, different, or could not be played."""
    from rich.table import Table

    table = Table(title=f"replay of {result.path}", title_justify="left")
    table.add_column("trajectories")
    table.add_column("", justify="right")
    table.add_column("")
    table.add_row("equal", str(result.equal), f"{result.turns} turns, {result.observations} observations compared")
    whats = [difference.what for difference in result.differences]
    kinds = ", ".join(f"{what} {whats.count(what)}" for what in sorted(set(whats)))
    table.add_row("different", str(len({difference.trajectory for difference in result.differences})), kinds)
    for kind, label in (
        ("not_replayable", "not replayable"),
        ("no_environment", "no environment"),
        ("failed", "failed when replayed"),
    ):
        found = result.problems.get(kind, {})
        if found:
            table.add_row(label, str(len(found)), "")
    if result.skipped:
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(result.skipped.items()))
        table.add_row("left out", str(sum(result.skipped.values())), f"failed or repeated: {outcomes} (see --attempts)")
    return table


def report_lines(result: Replay, show: int) -> list[str]:
    """Each difference and each problem in one line, at most `show` of either, safe to print."""
    from stepgym.inspect.plain_text import plain

    lines = []
    for difference in result.differences[:show]:
        turn = "" if difference.turn is None else f" turn {difference.turn}" if difference.turn else " reset"
        lines.append(plain(f"{difference.trajectory}{turn} {difference.what}: {difference.diff}"))
    if len(result.differences) > show:
        lines.append(f"and {len(result.differences) - show} more differences (--show, --json)")
    problems: dict[tuple[str, str], list[str]] = {}
    for kind, found in result.problems.items():
        for name, why in found.items():
            problems.setdefault((kind, why), []).append(name)
    for (kind, why), names in list(problems.items())[:show]:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(plain(f"{names[0]}{others} {kind.replace('_', ' ')}: {why}"))
    if len(problems) > show:
        lines.append(f"and {len(problems) - show} more reasons why some could not be replayed (--show, --json)")
    if not result.differences:
        lines.append("every replayed episode answered as recorded" if result.played else "nothing was replayed")
    return lines
