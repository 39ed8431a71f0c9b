"""`stepgym list envs|agents|engines|algorithms|sinks`: what is there, and the fields of each."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from stepgym.config import ConfigField, describe
from stepgym.errors import StepgymError
from stepgym.plugins import Registry


class Kind(StrEnum):
    """What can be listed."""

    ENVS = "envs"
    AGENTS = "agents"
    ENGINES = "engines"
    ALGORITHMS = "algorithms"
    SINKS = "sinks"


@dataclass(frozen=True)
class Entry:
    """One thing that can be named in a recipe.

    Attributes:
        kind: `environment`, `agent`, `engine`, or the kind of algorithm (`credit`, `loss`, ...).
        name: Its name.
        target: Where it lives, as `module:Name`.
        doc: First line of its docstring.
        fields: Its config.
        problem: Why it cannot be used here (a missing extra, say); empty where it can.
    """

    kind: str
    name: str
    target: str
    doc: str
    fields: list[ConfigField]
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {**asdict(self), "fields": [field.to_dict() for field in self.fields]}


def list_entries(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List environments, agents, engines, algorithms or sinks of metrics with their fields."""
    entries = entries_of(kind)
    if as_json:
        typer.echo(json.dumps([entry.to_dict() for entry in entries], indent=2))
    else:
        typer.echo("\n\n".join(_text(entry) for entry in entries) or f"no {kind} are installed")


def entries_of(kind: Kind) -> list[Entry]:
    """Everything of a kind. What cannot be imported is listed with the reason."""
    if kind is Kind.ENVS:
        from stepgym.env.registry import env_class, env_names, env_target

        return [_entry("environment", name, env_target(name), env_class) for name in env_names()]
    return [
        _entry(registry.noun, name, registry.target(name), registry.get)
        for registry in _registries(kind)
        for name in registry.names()
    ]


def _registries(kind: Kind) -> list[Registry[Any]]:
    if kind is Kind.AGENTS:
        from stepgym.run import AGENTS

        return [AGENTS]
    if kind is Kind.ENGINES:
        from stepgym.model.engines import ENGINES

        return [ENGINES]
    if kind is Kind.SINKS:
        from stepgym.train.sinks import SINKS

        return [SINKS]
    from stepgym.credit import CREDITS
    from stepgym.train.corrections import CORRECTIONS
    from stepgym.train.losses import KLS, LOSSES

    return [CREDITS, LOSSES, KLS, CORRECTIONS]


def _entry(kind: str, name: str, target: str, load: Callable[[str], Any]) -> Entry:
    try:
        thing = load(name)
        doc = (inspect.getdoc(thing) or "").split("\n", 1)[0]
        return Entry(kind, name, target, doc, describe(thing))
    except (StepgymError, TypeError) as error:
        return Entry(kind, name, target, "", [], problem=str(error))


def _text(entry: Entry) -> str:
    lines = [f"{entry.name}  ({entry.kind}, {entry.target})"]
    lines += [f"  {line}" for line in (entry.doc, entry.problem and f"cannot be used: {entry.problem}") if line]
    heads = [f"{field.name}: {field.type}" for field in entry.fields]
    width = min(max(map(len, heads), default=0), 48)
    for field, head in zip(entry.fields, heads, strict=True):
        value = "required" if field.required else f"= {json.dumps(field.to_dict()['default'], ensure_ascii=False)}"
        lines.append(f"    {head:<{width}}  {value}" + (f"  {field.doc}" if field.doc else ""))
    return "\n".join(lines)
