"""`stepgym new-env NAME`: the package of a new environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepgym.env.scaffold import write_package


def new_env(
    name: Annotated[str, typer.Argument(help="Name of the environment, such as number-guess.")],
    directory: Annotated[Path, typer.Option("--dir", help="Folder in which the package's folder is made.")] = Path("."),
) -> None:
    """Write the package of a new environment: a ToolEnv, its test and a README."""
    root = write_package(name, directory)
    typer.echo(f"wrote {root}")
    typer.echo(f"next: pip install -e {root} && pytest {root} && stepgym check-env {name}")
