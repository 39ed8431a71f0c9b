"""`stepgym show RUN ID`: one trajectory in the terminal, token by token if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stepgym.errors import UserError


def show(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of trajectories.")],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="phase/iteration/task/sample/attempt, or how it begins."),
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="The first that fits, by id.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The one of the lowest reward that fits.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The one of the highest reward that fits.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Token by token instead of as a conversation.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Long texts and prompts whole.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for --tokens: a folder or a hub name; by default the run's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show one trajectory: what it was, what was said, and with --tokens every token with logprob and advantage."""
    from rich.console import Console

    from stepgym.cli.transcript import all_lines
    from stepgym.inspect.recorded_run import RecordedRun
    from stepgym.inspect.selection import Pick
    from stepgym.inspect.show import show as look_up
    from stepgym.inspect.token_text import find_token_texts
    from stepgym.record.delta import find_deltas

    wanted: list[Pick] = []
    if first:
        wanted.append("first")
    if worst:
        wanted.append("worst")
    if best:
        wanted.append("best")
    if len(wanted) > 1:
        raise UserError(f"show: --{wanted[0]} and --{wanted[1]} exclude each other")
    if tokenizer is not None and not tokens:
        raise UserError("show: --tokenizer has no effect without --tokens")
    shown = look_up(run, name, pick=wanted[0] if wanted else None)
    if as_json:
        print(json.dumps(shown.to_dict()))
        return
    steps = shown.trajectory.steps
    texts = None
    if tokens and any(step.prompt_ids is not None for step in steps):
        texts = find_token_texts(RecordedRun.of(run), tokenizer)
        if texts is None:
            typer.echo(f"{run}: the run keeps no tokenizer, so ids are shown without text; give --tokenizer", err=True)
    kept = [delta.keep for delta in find_deltas(steps)] if tokens else []
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in all_lines(shown, full=full, tokens=tokens, texts=texts, kept=kept):
        console.print(line)
