"""`stepgym train RECIPE`: the whole of a run, resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgym.errors import StepgymError

if TYPE_CHECKING:
    from stepgym.train.parallel.processes import Processes
    from stepgym.train.recipe import Recipe


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as in budget.iterations=10.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/RECIPE/TIME-SEED.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; by default the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a model by a recipe. The same folder and recipe go on where they were cut off.

    On several GPUs of a machine: torchrun --nproc-per-node N -m stepgym.cli.main train RECIPE ...
    """
    from rich.console import Console

    from stepgym.cli.progress import ProgressDisplay
    from stepgym.cli.tables import policy_table
    from stepgym.cli.training_table import training_table
    from stepgym.run.folder import RunFolder, default_path, run_folder
    from stepgym.run.rollouts import RunStoppedError
    from stepgym.train.loop import train as run

    changes = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    with _joined(recipe, changes) as (processes, plan), ExitStack() as stack:
        opened: list[tuple[RunFolder, ProgressDisplay]] = []

        def open_folder() -> None:
            path = out or default_path(f"{recipe.resolve().parent.name}-{recipe.stem}", plan.seed)
            config = plan.model_dump(mode="json")
            folder = stack.enter_context(run_folder(path, config=config, digest=plan.digest))
            shown = stack.enter_context(ProgressDisplay())
            shown.note(f"run: {path}")
            shown.console.print(policy_table(plan.outcome_policy))
            opened.append((folder, shown))

        processes.lead(open_folder)
        if not processes.is_lead:
            run(plan, None, None, processes)
            return
        folder, display = opened[0]
        path = folder.path
        try:
            result = run(plan, folder, display, processes)
        except (KeyboardInterrupt, RunStoppedError) as stop:
            how = "interrupted" if isinstance(stop, KeyboardInterrupt) else "stopped"
            again = " ".join([_command(processes), str(recipe), *changes])
            display.note(f"{how}; go on with: {again} --out {path}")
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


@contextmanager
def _joined(recipe: Path, changes: Sequence[str]) -> Iterator[tuple[Processes, Recipe]]:
    """The ranks of this run, and its recipe once it is read and checked on all of them."""
    from stepgym.train.loop import check_training
    from stepgym.train.parallel.processes import Processes
    from stepgym.train.recipe import load_recipe

    several = Processes.expected()
    mistake: StepgymError | None = None
    device = "cpu"
    try:
        plan = load_recipe(recipe, changes)
        check_training(plan, several)
        device = str(plan.policy.get("device", "auto"))
    except StepgymError as error:
        if several == 1:
            raise
        mistake = error

    def check() -> None:
        if mistake is not None:
            raise mistake

    with Processes.start(device) as processes:
        processes.together(check)
        yield processes, plan


def _command(processes: Processes) -> str:
    """How a run with as many processes is started."""
    if processes.size == 1:
        return "stepgym train"
    machines = processes.size // processes.local_size
    where = f"--nnodes {machines} " if machines > 1 else ""
    return f"torchrun {where}--nproc-per-node {processes.local_size} -m stepgym.cli.main train"
