"""What a sink is: told the metrics of a run, it takes them somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run whose metrics a sink is given.

    Attributes:
        folder: The run's folder.
        name: For people: the last two parts of the folder's path.
        id: Made up when the run was first started; the same whenever it goes on.
        config: The resolved recipe as JSON, without what looks like a credential.
        after: The run goes on after this iteration, later ones are done again; None where it begins.
    """

    folder: Path
    name: str
    id: str
    config: Mapping[str, Any]
    after: int | None = None


class Sink:
    """Takes the metrics of a run somewhere.

    The keyword-only parameters of the constructor are the sink's options in a recipe. Any of its methods may raise:
    the run says so in a line and goes on. None of them should wait long, for the run waits with it.

    Attributes:
        requires: The package that the sink needs; a recipe that asks for it where it is not installed is refused.
        cuts_back: Whether `open` takes back what was written after `RunInfo.after`. To a sink that cannot, iterations
            that a resumed run does again are not written again.
    """

    requires: ClassVar[str | None] = None
    cuts_back: ClassVar[bool] = False

    @property
    def address(self) -> str | None:
        """Where people find the metrics, once it is open: a folder, a URL."""
        return None

    def open(self, run: RunInfo) -> None:
        """Begin, or go on where the run is resumed."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite numbers of an iteration, by their names in `metrics.jsonl`."""
        raise NotImplementedError

    def alarm(self, step: int, name: str, text: str) -> None:
        """Take an alarm, which is also in the iteration's metrics as `alarm/NAME`."""

    def close(self, summary: Mapping[str, float] | None) -> None:
        """End, with the numbers of `summary.json`; None where the run did not come to its end."""
