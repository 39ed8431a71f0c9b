"""The metrics of a run on their way: to `metrics.jsonl`, to whoever watches, to alarms, to sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepgym.run.folder import RunFolder
from stepgym.train.alarms import Alarm, Alarms
from stepgym.train.observer import Observer
from stepgym.train.sinks.base import RunInfo
from stepgym.train.sinks.config import MetricsConfig
from stepgym.train.sinks.guarded import GuardedSink

_SECRET = ("api_key", "apikey", "token", "password", "secret")


class MetricsLog:
    """Takes the rows of a run's metrics wherever they go. `begin` comes first, `close` last.

    Args:
        config: The recipe's section `metrics`.
        folder: The run's folder.
        observer: Told of every iteration and every alarm.
        recipe: The resolved recipe as JSON, for sinks that show it.

    Raises:
        UserError: A sink's package is not installed.
    """

    def __init__(
        self, config: MetricsConfig, folder: RunFolder, observer: Observer, recipe: Mapping[str, Any] | None = None
    ) -> None:
        self._folder = folder
        self._observer = observer
        self._recipe = _without_secrets(recipe or {})
        self._sinks = [GuardedSink(kind, sink, observer.note) for kind, sink in config.make_sinks().items()]
        self._alarms = None if config.alarms is None else Alarms(config.alarms)

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms so far, those before the run was resumed included."""
        return [] if self._alarms is None else list(self._alarms.raised)

    def begin(self, after: int | None) -> None:
        """Cut back what the run will do again, and open the sinks.

        Args:
            after: The last iteration that stands; None where the run begins, and nothing stands.
        """
        self._folder.keep_metrics(lambda row: after is not None and row.get("iteration", 0) <= after)
        if self._alarms is not None:
            self._alarms.replay(self._folder.metrics())
        path = self._folder.path.resolve()
        name = f"{path.parent.name}/{path.name}"
        for sink in self._sinks:
            sink.open(RunInfo(folder=path, name=name, id="", config=self._recipe, after=after))

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row that belongs to no iteration."""
        self._folder.add_metrics(row)

    def iteration(self, number: int, row: Mapping[str, Any]) -> None:
        """Take the metrics of an iteration."""
        found = [] if self._alarms is None else self._alarms.look(number, row)
        whole = {**row, **{f"alarm/{alarm.name}": 1 for alarm in found}}
        self._folder.add_metrics(whole)
        self._observer.iteration(number, whole)
        for alarm in found:
            self._observer.alarm(alarm.name, alarm.text)
        for sink in self._sinks:
            for alarm in found:
                sink.alarm(number, alarm.name, alarm.text)
            sink.write(number, whole)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the sinks. Safe to call twice; without a summary where the run did not come to its end."""
        for sink in self._sinks:
            sink.close(summary)


def _without_secrets(value: Any) -> Any:
    """The same config without the values of fields that look like credentials."""
    if isinstance(value, Mapping):
        return {
            name: "hidden" if str(name).lower().endswith(_SECRET) and inner is not None else _without_secrets(inner)
            for name, inner in value.items()
        }
    return [_without_secrets(inner) for inner in value] if isinstance(value, (list, tuple)) else value
