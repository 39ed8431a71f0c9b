"""Alarms in plain words when something that precedes a collapse moves."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from stepgym.plugins import unknown
from stepgym.train.alarm_rules import RULES, Row, Rule

LEAST_BASELINE = 5
"""A baseline is the median of at least this many iterations; before that only levels count."""

_TO_SIGMA = 1.4826  # median absolute deviation of a normal distribution, to its standard deviation
_RELEASE = 3  # iterations within half of the bounds after which an alarm may be raised again
_LEAST_LEVEL = 0.8  # of a level, on the way back


class AlarmConfig(BaseModel):
    """When alarms are raised.

    Attributes:
        window: Iterations that the baseline is the median of.
        deviations: How many (normalised) median absolute deviations off the baseline are alarming.
        levels: Other levels, `{alarm: number}`, past which an alarm is raised whatever was before; null for none.
        off: Alarms that are not raised.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(default=10, ge=LEAST_BASELINE)
    deviations: float = Field(default=6.0, gt=0)
    levels: dict[str, float | None] = {}
    off: tuple[str, ...] = ()

    @field_validator("levels", "off")
    @classmethod
    def _known(cls, value: Any) -> Any:
        names = [rule.name for rule in RULES]
        for name in value:
            if name not in names:
                raise ValueError(unknown("alarm", name, names))
        return value


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that moved.

    Attributes:
        name: Which alarm.
        iteration: When it was raised.
        value: The number then.
        before: The baseline; None where the number is past a level.
        text: What was seen, what it usually means, what to try: one line.
    """

    name: str
    iteration: int
    value: float
    before: float | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Alarms:
    """Watches the metrics of a run. Each event is told once: again only after the number has been back for a while.

    A number is compared with the median of the iterations before, over those that were not beyond the bounds
    themselves. One that stays where it moved to becomes the baseline after twice the window.

    Args:
        config: When alarms are raised.

    Attributes:
        raised: All alarms so far.
    """

    def __init__(self, config: AlarmConfig | None = None) -> None:
        config = config or AlarmConfig()
        self.raised: list[Alarm] = []
        self._watches = [_Watch(rule, config) for rule in RULES if rule.name not in config.off]

    def look(self, iteration: int, row: Row) -> list[Alarm]:
        """The alarms that an iteration's metrics raise."""
        found = [alarm for watch in self._watches if (alarm := watch.look(iteration, row)) is not None]
        self.raised += found
        return found

    def replay(self, rows: Iterable[Row]) -> None:
        """Look at the rows of `metrics.jsonl` that a resumed run goes on from."""
        for row in rows:
            iteration = int(row.get("iteration", 0))
            if iteration > 0:
                self.look(iteration, row)


class _Watch:
    """One rule over a run."""

    def __init__(self, rule: Rule, config: AlarmConfig) -> None:
        self._rule = rule
        self._deviations = config.deviations
        self._level = config.levels.get(rule.name, rule.level)
        self._baseline: deque[float] = deque(maxlen=config.window)
        self._latest: deque[float] = deque(maxlen=config.window)
        self._first: list[float] = []
        self._beyond = 0  # iterations in a row
        self._raised = False
        self._quiet = 0  # iterations in a row, once raised
        self._since = 0  # iterations since it was raised

    def look(self, iteration: int, row: Row) -> Alarm | None:
        value = self._rule.value(row)
        if value is None:
            return None
        self._latest.append(value)
        if len(self._first) < LEAST_BASELINE:
            self._first.append(value)
        if self._raised:
            self._recover(value)
            return None
        calm = self._rule.calm is not None and self._rule.calm(row)
        if calm or not self._is_beyond(value, 1.0):
            self._beyond = 0
            self._baseline.append(value)
            return None
        self._beyond += 1
        if self._beyond < self._rule.patience:
            return None
        self._raised, self._beyond, self._quiet, self._since = True, 0, 0, 0
        before = None if self._past_level(value, 1.0) else self._before(value)
        return Alarm(self._rule.name, iteration, value, before, self._text(value, before))

    def _recover(self, value: float) -> None:
        """Make ready for the next event once this one is over, or has become how things are."""
        self._since += 1
        if self._since == 2 * self._latest.maxlen:  # type: ignore[operator]  # it has one
            self._baseline = self._latest.copy()
            self._first = list(self._latest)[-LEAST_BASELINE:]
        self._quiet = 0 if self._is_beyond(value, 0.5) else self._quiet + 1
        if self._quiet >= _RELEASE:
            self._raised = False

    def _is_beyond(self, value: float, scale: float) -> bool:
        """Whether a number is beyond the bounds; `scale` below 1 narrows them."""
        return self._past_level(value, scale) or self._off_baseline(value, scale) or self._off_start(value)

    def _past_level(self, value: float, scale: float) -> bool:
        if self._level is None:
            return False
        slack = 1.0 if scale == 1.0 else _LEAST_LEVEL
        return value > self._level * slack if self._rule.rises else value < self._level / slack

    def _off_baseline(self, value: float, scale: float) -> bool:
        rule = self._rule
        if rule.jump is None or len(self._baseline) < LEAST_BASELINE:
            return False
        middle = statistics.median(self._baseline)
        spread = statistics.median(abs(number - middle) for number in self._baseline)
        least = max(rule.jump, self._deviations * _TO_SIGMA * spread)
        moved = value - middle if rule.rises else middle - value
        factor = 1.0 + (rule.factor - 1.0) * scale
        return moved > least * scale and (value > factor * middle if rule.rises else value < factor * middle)

    def _off_start(self, value: float) -> bool:
        share = self._rule.start_factor
        if share is None or len(self._first) < LEAST_BASELINE:
            return False
        bound = share * statistics.median(self._first)
        return value > bound if self._rule.rises else value < bound

    def _before(self, value: float) -> float:
        return statistics.median(self._first if self._off_start(value) else self._baseline)

    def _text(self, value: float, before: float | None) -> str:
        rule = self._rule
        seen = rule.shown.format(value)
        if before is None:
            bound = f"{'over' if rule.rises else 'under'} {self._level:g}"
            seen += f" ({bound}" + (f" for {rule.patience} iterations)" if rule.patience > 1 else ")")
        else:
            when = "at the start" if self._off_start(value) else f"median of {len(self._baseline)} iterations"
            seen += f"; before {_number(rule.shown, before)} ({when})"
        return f"{rule.name}: {seen}. {rule.means} {rule.remedy}"


def _number(shown: str, value: float) -> str:
    """Only the number of a text that shows one."""
    start, end = shown.index("{"), shown.index("}") + 1
    return shown[start:end].format(value)
