"""`stepgym check-env ID`: does an environment keep its promises."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stepgym.config import apply_overrides
from stepgym.env.check import check_env as run_checks


def check_env(
    env: Annotated[str, typer.Argument(help="Id, short name or module:Class of the environment.")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="Its config.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the episodes that are played.")] = 0,
    step_timeout: Annotated[float, typer.Option(help="Seconds after which a step counts as hung.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that an environment keeps its promises: exit code 0 when it does, 1 when it does not."""
    report = run_checks(
        env,
        apply_overrides({}, fields or []),
        seed=seed,
        step_timeout=step_timeout,
        progress=lambda name: typer.echo(f"checking {name} ...", err=True),
    )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        typer.echo(str(report))
        errors, warned = len(report.errors), len(report.warnings)
        typer.echo(f"{env}: {errors} errors, {warned} warnings" if errors or warned else f"{env}: all checks passed")
    if not report.ok:
        raise typer.Exit(1)
