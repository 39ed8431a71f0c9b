"""`stepgym train RECIPE`: the whole of a run, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as in budget.iterations=10.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/RECIPE/TIME-SEED.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; by default the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a model by a recipe. The same folder and recipe go on where they were cut off."""
    from rich.console import Console

    from stepgym.cli.progress import ProgressDisplay
    from stepgym.cli.tables import policy_table
    from stepgym.cli.training_table import training_table
    from stepgym.run.folder import default_path, run_folder
    from stepgym.run.rollouts import RunStoppedError
    from stepgym.train.recipe import load_recipe

    changes = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    plan = load_recipe(recipe, changes)
    from stepgym.train.loop import check_training
    from stepgym.train.loop import train as run

    check_training(plan)
    path = out or default_path(f"{recipe.resolve().parent.name}-{recipe.stem}", plan.seed)
    with (
        run_folder(path, config=plan.model_dump(mode="json"), digest=plan.digest) as folder,
        ProgressDisplay() as display,
    ):
        display.note(f"run: {path}")
        display.console.print(policy_table(plan.outcome_policy))
        try:
            result = run(plan, folder, display)
        except (KeyboardInterrupt, RunStoppedError) as stop:
            how = "interrupted" if isinstance(stop, KeyboardInterrupt) else "stopped"
            display.note(f"{how}; go on with: stepgym train {' '.join([str(recipe), *changes])} --out {path}")
            raise
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(training_table(result), soft_wrap=False)
    console.print(f"run      {path}")
    console.print(f"curve    {path / 'curve.png'}")
    console.print(f"model    {result.model}")
    console.print(
        f"next     stepgym eval --env {plan.env_kind} --engine transformers --model {result.model} "
        f"--recipe {path / 'config.yaml'}"
    )
