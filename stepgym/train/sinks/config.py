"""The section `metrics` of a recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from stepgym.config import validate_kwargs
from stepgym.errors import UserError
from stepgym.train.alarms import AlarmConfig
from stepgym.train.sinks import SINKS
from stepgym.train.sinks.base import Sink

_ALWAYS = {"console": "the console", "jsonl": "metrics.jsonl", "json": "metrics.jsonl"}


class MetricsConfig(BaseModel):
    """Where metrics go, besides the console and `metrics.jsonl`, and which alarms are raised.

    A run may be resumed with another one: nothing that is trained depends on it.

    Attributes:
        sinks: Names, or mappings with `kind` and the sink's options: `[tensorboard, {kind: wandb, mode: offline}]`.
        alarms: `true`, `false` for none, or a mapping (`stepgym.train.alarms.AlarmConfig`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sinks: tuple[dict[str, Any], ...] = ()
    alarms: AlarmConfig | None = AlarmConfig()

    @field_validator("alarms", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        return (AlarmConfig() if value else None) if isinstance(value, bool) else value

    @field_validator("sinks", mode="before")
    @classmethod
    def _checked(cls, value: Any) -> Any:
        given = [value] if isinstance(value, (str, Mapping)) else () if value is None else value
        if not isinstance(given, (list, tuple)):
            raise ValueError(f"expected names or mappings with 'kind', got {value!r}")
        sinks = [{"kind": sink} if isinstance(sink, str) else sink for sink in given]
        for place, sink in enumerate(sinks):
            if not isinstance(sink, Mapping) or not isinstance(sink.get("kind"), str):
                raise ValueError(f"expected names or mappings with 'kind', got {sink!r}")
            kind = sink["kind"]
            if kind in _ALWAYS:
                raise ValueError(f"{kind!r}: {_ALWAYS[kind]} is always written; leave it out")
            if kind in [other["kind"] for other in sinks[:place]]:
                raise ValueError(f"{kind!r} is there twice")
            try:
                found: Any = SINKS.get(kind)
                if not (isinstance(found, type) and issubclass(found, Sink)):
                    raise ValueError(f"{kind!r} is no sink: a class derived from stepgym.train.sinks.base.Sink")
                validate_kwargs(found, _options(sink), kind)
            except UserError as error:
                raise ValueError(str(error)) from None
        return tuple(dict(sink) for sink in sinks)

    def require_packages(self) -> None:
        """Refuse sinks whose package is not installed.

        Raises:
            UserError: In one line that says how to get it.
        """
        for sink in self.sinks:
            package = SINKS.get(sink["kind"]).requires
            if package is not None and importlib.util.find_spec(package) is None:
                raise UserError(
                    f"metrics.sinks: {sink['kind']} needs the package {package!r}, which is not installed; "
                    f"pip install {package}, or leave the sink out"
                )

    def make_sinks(self) -> dict[str, Sink]:
        """The sinks by name, not opened yet. Raises `UserError` where a package is missing."""
        self.require_packages()
        made: dict[str, Sink] = {}
        for sink in self.sinks:
            found = SINKS.get(sink["kind"])
            made[sink["kind"]] = found(**validate_kwargs(found, _options(sink), f"metrics.sinks: {sink['kind']}"))
        return made


def _options(sink: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sink.items() if name != "kind"}
