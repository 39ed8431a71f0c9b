"""`stepgym audit RUN`: check what a run has stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgym.cli.json_output import json_report
from stepgym.errors import UserError
from stepgym.inspect.plain_text import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stepgym.inspect.audit import Audit, CheckResult, LogprobGap


def audit(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of trajectories.")],
    phase: Annotated[list[str] | None, typer.Option(help="Only this phase, as train; may be repeated.")] = None,
    fail_on: Annotated[
        str,
        typer.Option(help="What makes the exit code 1: error, warning, note, names of checks; several with commas."),
    ] = "error",
    tokenizer: Annotated[
        str | None, typer.Option(help="The model's tokenizer; by default the one that the run has kept.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Recompute logprobs with this model; auto takes the run's own checkpoints."),
    ] = None,
    weights_version: Annotated[
        str | None, typer.Option(help="Version of the weights in --model; by default its checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where --model runs, as cpu or cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Type of its weights: float32, bfloat16 or float64.")] = "float32",
    max_gap: Annotated[
        float, typer.Option(min=0.0, help="A step whose mean logprob gap, in nats, is above this is an error.")
    ] = 0.05,
    every: Annotated[
        bool, typer.Option("--all", help="Also checks that found nothing, and figures that are 0.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="How many findings of each check are shown.")] = 5,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write everything as JSON into this file; - prints it instead.")
    ] = None,
) -> None:
    """Check what a run has stored: exit code 0 where the gate holds, 1 where it does not."""
    from rich.console import Console

    from stepgym.cli.progress import ProgressDisplay
    from stepgym.inspect.audit import CHECKS, GapOptions
    from stepgym.inspect.audit import audit as look
    from stepgym.inspect.audit.finding import parse_gate

    parse_gate(fail_on, list(CHECKS))
    if dtype not in ("float32", "bfloat16", "float64"):
        raise UserError(f"audit: --dtype must be float32, bfloat16 or float64, not {dtype!r}")
    if model is None and weights_version is not None:
        raise UserError("audit: --weights-version says which weights --model has; give --model too")
    if json_file not in (None, "-") and not Path(str(json_file)).absolute().parent.is_dir():
        raise UserError(f"audit: --json {json_file}: there is no folder for this file")
    options = None
    if model is not None:
        options = GapOptions(model, weights_version=weights_version, device=device, dtype=dtype, max_gap=max_gap)
    with ProgressDisplay() as display:
        display.stage("trajectories", None)
        found = look(
            run,
            phases=tuple(phase or ()),
            tokenizer=tokenizer,
            model=options,
            limit=limit,
            progress=lambda read: display.advance(read, {}),
        )
    failed = found.failed(fail_on)
    report = {**found.to_dict(), "fail_on": fail_on, "failed": [result.check for result in failed]}
    if json_file == "-":
        print(json_report(report))
    else:
        if json_file is not None:
            _write(Path(json_file), report)
        _show(
            found,
            Console(highlight=False, markup=False, soft_wrap=True),
            fail_on,
            [r.check for r in failed],
            every=every,
        )
    if failed:
        raise typer.Exit(1)


def _write(path: Path, report: Mapping[str, Any]) -> None:
    try:
        path.write_text(json_report(report) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"audit: --json {path}: {error.strerror}") from None


def _show(found: Audit, console: Console, fail_on: str, failed: list[str], *, every: bool) -> None:
    console.print(statistics_table(found.statistics, every=every))
    if found.logprob_gap is not None:
        console.print(gap_table(found.logprob_gap))
        for line in _gap_lines(found.logprob_gap):
            console.print(plain(line))
    shown = [result for result in found.checks if every or result.counts]
    if shown:
        console.print(checks_table(shown))
    quiet = sum(result.status == "ok" for result in found.checks)
    console.print(f"{quiet} of {len(found.checks)} checks found nothing" + ("" if every else " (--all lists them)"))
    for reason in dict.fromkeys(result.skipped for result in found.checks if result.skipped):
        names = ", ".join(result.check for result in found.checks if result.skipped == reason)
        part, _, why = reason.rpartition("in part: ")
        console.print(f"skipped{' in part' if part or why != reason else ''} {names}: {why}")
    mute = found.statistics["steps_without_ids"]
    if mute:
        console.print(f"{mute:,} of {found.steps:,} steps have no token ids: nothing about tokens was checked in them")
    for finding in found.findings:
        console.print(plain(f"{finding.severity}  {finding.check}: {finding.place}: {finding.text}"))
        if finding.context:
            console.print(plain(f"    {finding.context}"))
    more = sum(sum(each.counts.values()) for each in found.checks) - len(found.findings)
    if more:
        console.print(f"{more} more findings are not shown (--limit, --json)")
    verdict = f"fails on {', '.join(failed)}" if failed else "holds"
    console.print(
        f"{found.trajectories:,} trajectories, {found.steps:,} steps, {found.tokens:,} tokens, {found.seconds:.1f} s; "
        f"the gate ({fail_on}) {verdict}"
    )


def checks_table(results: Sequence[CheckResult]) -> Table:
    """One row for each check, and what it came to."""
    table = _table("check", "result", "errors", "warnings", "notes")
    for result in results:
        counts = [str(result.counts.get(severity, 0) or "") for severity in ("error", "warning", "note")]
        table.add_row(result.check, result.status, *counts)
    return table


def statistics_table(statistics: Mapping[str, Any], *, every: bool = True) -> Table:
    """The figures about the run; without `every` only those that are not zero or empty."""
    table = _table("figure", "value")
    for name, value in statistics.items():
        empty = not any(value.values()) if isinstance(value, Mapping) else not value
        if every or not empty:
            table.add_row(name.replace("_", " "), _figure(value, share=name.endswith("_share")))
    return table


def gap_table(gap: LogprobGap) -> Table:
    """Sampled against recomputed logprobs: one row for each weights version, and one for all."""
    table = _table("logprob gap", "steps", "tokens", "mean", "99 %", "max", "bias")
    for each in gap.versions:
        name = f"version {each.version}" if each.version else each.model
        table.add_row(name, str(each.steps), str(each.tokens), *map(_small, (each.mean, each.p99, each.max, each.bias)))
    if len(gap.versions) != 1:
        table.add_row("all", str(gap.steps), str(gap.tokens), *map(_small, (gap.mean, gap.p99, gap.max, gap.bias)))
    return table


def _gap_lines(gap: LogprobGap) -> Iterator[str]:
    if gap.not_compared:
        yield "not compared: " + ", ".join(f"{count} steps ({reason})" for reason, count in gap.not_compared.items())
    for token in gap.worst:
        yield (
            f"gap {abs(token.sampled - token.recomputed):.3g}: {token.trajectory}, step {token.step}, "
            f"token {token.token}: sampled {token.sampled:.4g}, recomputed {token.recomputed:.4g}"
        )
        yield f"    {token.context}"


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table()
    for position, head in enumerate(heads):
        numbers = head in ("errors", "warnings", "notes")
        table.add_column(head, justify="right" if numbers else "left", no_wrap=not position or numbers)
    return table


def _figure(value: Any, *, share: bool = False) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(str(name))}: {_figure(each)}" for name, each in value.items()) or "–"
    if isinstance(value, float):
        return f"{value:.1%}" if share else f"{value:.3g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.2e}"
