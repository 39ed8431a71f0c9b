"""`stepgym eval`: measure a model in an environment, or compare two measurements; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stepgym.errors import UserError


def eval(  # named like its verb
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the config, as in env.max_turns=4 or rollout.concurrency=8.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment: an id, a short name, or module:Class.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model at the endpoint, or a folder or hub name.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint, as http://host:8000/v1.")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine in place of an endpoint, as transformers.")] = None,
    api: Annotated[str, typer.Option(help="auto, chat or completions.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer of the endpoint's model, for exact ids.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Take everything that is not said here from this recipe.")] = None,
    split: Annotated[str, typer.Option(help="Split of tasks.")] = "test",
    tasks: Annotated[int, typer.Option(min=1, help="How many tasks of the split.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/eval-ENV/TIME-SEED.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two runs task by task instead.", metavar="A B")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure a model in an environment. The same folder and options go on where they were cut off."""
    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    from rich.console import Console

    from stepgym.cli.playing import Play, play_recipe
    from stepgym.cli.tables import evaluation_table
    from stepgym.config import apply_overrides, load_yaml
    from stepgym.run.folder import default_path
    from stepgym.train.recipe import KINDS, check_recipe

    fields: dict[str, Any] = dict(load_yaml(recipe)) if recipe is not None else {}
    fields.pop("play", None)
    if env is not None and (fields.get("env") or {}).get("kind") != env:
        fields["env"] = {"kind": env}
    if "env" not in fields:
        raise UserError("eval: which environment? Give --env, as in --env sql (see `stepgym list envs`)")
    if model is None and recipe is None:
        raise UserError("eval: which model? Give --model, and --base-url for an endpoint or --engine transformers")
    if base_url is None and engine is None and recipe is None:
        raise UserError("eval: where is the model? Give --base-url URL, or --engine transformers to run it here")
    if base_url is not None and engine is not None:
        raise UserError("eval: --base-url and --engine exclude each other")
    if model is not None:
        fields["model"] = {"kind": "pretrained", "path": model}
    if base_url is not None:
        fields["engine"] = _endpoint(api, base_url, tokenizer)
    elif engine is not None and (fields.get("engine") or {}).get("kind") != engine:
        fields["engine"] = {"kind": engine}
    rollout = dict(fields.get("rollout") or {})
    fields["rollout"] = {**rollout, "samples": samples}
    if temperature is not None:
        fields["sampling"] = {**(fields.get("sampling") or {}), "temperature": temperature}
    if seed is not None:
        fields["seed"] = seed
    fields = apply_overrides(fields, overrides or [], sections=KINDS)
    plan = check_recipe(fields, recipe or Path("eval"))
    path = out or default_path(f"eval-{plan.env_kind.rpartition(':')[2].rpartition('/')[2]}", plan.seed)

    connect = None
    if base_url is not None:
        from stepgym.model.engines.connect import connect as probe

        url, name = base_url, plan.model.path  # type: ignore[union-attr]
        options = {k: v for k, v in plan.engine.items() if k not in ("kind", "base_url", "model", "tokenizer")}

        async def connect() -> Any:
            return await probe(url, name, tokenizer=tokenizer, api=_api(api), **options)

    result = play_recipe(plan, Play(path, "eval", split, tasks), connect)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(evaluation_table(result, title=f"{plan.env_kind}, {split}"))
        console.print(f"run  {path}", soft_wrap=True)
    if result.incomplete:
        raise typer.Exit(3)


def _api(api: str) -> Literal["auto", "chat", "completions"]:
    if api not in ("auto", "chat", "completions"):
        raise UserError(f"eval: --api must be auto, chat or completions, not {api!r}")
    return api  # type: ignore[return-value]


def _endpoint(api: str, base_url: str, tokenizer: str | None) -> dict[str, Any]:
    """The engine section for an endpoint; what `auto` comes to is found out by asking it."""
    completions = _api(api) == "completions" or (api == "auto" and tokenizer is not None)
    section: dict[str, Any] = {"kind": "openai" if completions else "chat", "base_url": base_url}
    if completions:
        section["tokenizer"] = tokenizer
    return section


def _compare(a: Path, b: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from stepgym.cli.tables import comparison_table
    from stepgym.record.store import TrajectoryStore
    from stepgym.run.comparison import compare
    from stepgym.run.statistics import summarize

    sides = []
    for path in (a, b):
        folder = path / "trajectories" if (path / "trajectories").is_dir() else path
        with TrajectoryStore(folder) as store:
            sides.append(summarize(store, expected=_episodes_asked(path)))
    result = compare(*sides)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        Console(highlight=False).print(comparison_table(result, a=str(a), b=str(b)))


def _episodes_asked(path: Path) -> int | None:
    """How many episodes a run was asked for, so that those of an interrupted one are missed; None for a bare store."""
    from stepgym.config import load_yaml

    if not (path / "config.yaml").exists():
        return None
    config = load_yaml(path / "config.yaml")
    summary = path / "summary.json"
    # The split may have fewer tasks than were asked for; a run that has ended knows.
    asked = (
        json.loads(summary.read_text()).get("tasks_asked") if summary.exists() else config.get("play", {}).get("tasks")
    )
    return None if asked is None else int(asked) * int(config["rollout"]["samples"])
