"""`stepgym rollout RECIPE`: play and record, train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def rollout(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as in rollout.samples=4.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="How many tasks of the split.")] = 16,
    split: Annotated[str, typer.Option(help="Split of tasks.")] = "train",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/RECIPE-rollout/TIME-SEED.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; by default the recipe's.")] = None,
    expert: Annotated[bool, typer.Option("--expert", help="Let the environment's expert play.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Play the tasks of a recipe and record the trajectories. The same folder goes on where it was cut off."""
    from rich.console import Console

    from stepgym.cli.playing import Play, play_recipe
    from stepgym.cli.tables import evaluation_table
    from stepgym.run.folder import default_path
    from stepgym.train.recipe import load_recipe

    changes = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    plan = load_recipe(recipe, changes)
    path = out or default_path(f"{recipe.resolve().parent.name}-{recipe.stem}-rollout", plan.seed)
    options = plan.warm_start[-1].expert if plan.warm_start else {}
    played = play_recipe(plan, Play(path, "rollout", split, tasks, expert=options if expert else None))
    if as_json:
        print(json.dumps(played.to_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(evaluation_table(played, title=f"{plan.env_kind}, {split}"))
        console.print(f"run  {path}", soft_wrap=True)
    if played.incomplete:
        raise typer.Exit(3)
