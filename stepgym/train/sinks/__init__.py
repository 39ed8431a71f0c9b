"""Where metrics go besides the console and `metrics.jsonl`: one file per sink, found by name in `SINKS`.

`@SINKS.register("mine")` adds a `Sink`, an entry point in the group `stepgym.sinks` does too, and `module:Class` works
without registering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.train.sinks.base import Sink

SINKS: Registry[type[Sink]] = Registry(
    "sink",
    {
        "tensorboard": "stepgym.train.sinks.tensorboard:TensorBoardSink",
        "trackio": "stepgym.train.sinks.trackio:TrackioSink",
        "wandb": "stepgym.train.sinks.wandb:WandbSink",
    },
    group="stepgym.sinks",
)

__all__ = ["SINKS"]
