"""The command `stepgym`: finds the verb, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 a gate failed, 2 user error, 3 incomplete, 130 interrupted. Results go to stdout, progress and
errors to stderr. A verb's module is imported when the verb is run, so `stepgym --help` is quick.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from stepgym.errors import StepgymError
from stepgym.plugins import Registry

VERBS: Registry[Callable[..., Any] | typer.Typer] = Registry(
    "command",
    {
        "audit": "stepgym.cli.audit:audit",
        "check-env": "stepgym.cli.check_env:check_env",
        "engines": "stepgym.cli.engines:engines",
        "eval": "stepgym.cli.eval:eval",
        "list": "stepgym.cli.list:list_entries",
        "new-env": "stepgym.cli.new_env:new_env",
        "replay": "stepgym.cli.replay:replay",
        "rollout": "stepgym.cli.rollout:rollout",
        "show": "stepgym.cli.show:show",
        "train": "stepgym.cli.train:train",
    },
    group="stepgym.commands",
)
_HELP = {
    "audit": "Check every promise that a run's records can prove or break.",
    "check-env": "Check that an environment keeps its promises.",
    "engines": "Install, list or remove vLLM.",
    "eval": "Measure a model in an environment, or compare two measurements.",
    "list": "List environments, agents, engines, algorithms or sinks of metrics with their fields.",
    "new-env": "Write the package of a new environment.",
    "replay": "Play a run's recorded actions again and report what differs.",
    "rollout": "Play the tasks of a recipe and record the trajectories.",
    "show": "Show one trajectory, token by token if asked.",
    "train": "Train a model by a recipe.",
}


class VerbGroup(TyperGroup):
    """The verbs of `VERBS`. Listing them imports none of them; only the one that is run is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all verbs, those of plug-ins included."""
        return VERBS.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that has the verb's name and one line of help."""
        if cmd_name not in VERBS:
            return None
        return TyperCommand(cmd_name, help=_HELP.get(cmd_name, f"Added by {VERBS.target(cmd_name).split(':')[0]}."))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself, imported, with the arguments that are left for it."""
        name, rest = args[0], args[1:]
        verb = VERBS.get(name) if name in VERBS or not name.startswith("-") else ctx.fail(f"No such option: {name}")
        if isinstance(verb, typer.Typer):
            return name, typer.main.get_group(verb), rest
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(verb)
        return name, typer.main.get_command(single), rest


app = typer.Typer(cls=VerbGroup, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from stepgym import __version__

        typer.echo(f"stepgym {__version__}")
        raise typer.Exit


@app.callback()
def stepgym(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and detailed logs. Works after the verb too.")
    ] = False,
) -> None:
    """An agent-environment gym for language models that records every turn, and a trainer that learns from it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its code.

    Args:
        arguments: What follows `stepgym`; by default what the process was started with.
    """
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    arguments, debug = _without_debug(arguments)
    debug = debug or os.environ.get("STEPGYM_DEBUG", "0") not in ("", "0")
    _set_up_logging(debug)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that `module:Class` finds what lies in the folder one works in
    try:
        # Not typer's own main(): it would turn an interrupt and a closed pipe into codes without a word.
        group = typer.main.get_group(app)
        with group.make_context("stepgym", arguments or ["--help"]) as context:
            group.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort) as stop:
        # Ctrl-C may fall between the making of a coroutine and its first step; Python would complain of that on exit.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
        return 130 if _reported(stop) else _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has closed it (`stepgym list envs | head`). Python would complain again on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except StepgymError as error:
        if debug:
            raise
        return error.exit_code if _reported(error) else _fail(f"error: {_one_line(error)}", error.exit_code)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error; which class of click's it is depends on typer's version
            verb = getattr(getattr(error, "ctx", None), "command_path", "stepgym")
            return _fail(f"error: {_one_line(error.format_message())} (see '{verb} --help')", 2)
        if debug:
            raise
        if _reported(error):
            return 1
        return _fail(
            f"internal error: {type(error).__name__}: {_one_line(error)} (run again with --debug for the traceback)", 1
        )


def _reported(error: BaseException) -> bool:
    """Whether another process of the run says it (see `stepgym.train.parallel.processes`)."""
    return getattr(error, "reported", False)


def _is_follower() -> bool:
    """Whether torchrun started this process as another than the first, which does the talking."""
    return os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1"


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*kept, *arguments[end:]], len(kept) < end


def _set_up_logging(debug: bool) -> None:
    level = logging.ERROR if _is_follower() else logging.WARNING  # what rank 0 does too it also says
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("stepgym").setLevel(logging.DEBUG if debug else level)
    logging.getLogger("stepgym.progress").setLevel(logging.INFO)  # work of minutes: a corpus is read, an index built


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _fail(line: str, code: int) -> int:
    sys.stdout.flush()
    print(f"rank {os.environ['RANK']}: {line}" if _is_follower() else line, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
