"""The section `metrics` of a recipe: what is accepted, and one line for what is not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stepgym.config import validate
from stepgym.errors import UserError
from stepgym.train.alarms import AlarmConfig
from stepgym.train.sinks.base import Sink
from stepgym.train.sinks.config import MetricsConfig


class Elsewhere(Sink):
    """Needs what nobody has."""

    requires = "no_such_package"


@pytest.mark.parametrize(
    ("given", "sinks"),
    [
        (None, []),
        ([], []),
        ("tensorboard", [{"kind": "tensorboard"}]),
        ({"kind": "wandb", "mode": "offline"}, [{"kind": "wandb", "mode": "offline"}]),
        (
            ["tensorboard", {"kind": "trackio", "project": "p"}],
            [{"kind": "tensorboard"}, {"kind": "trackio", "project": "p"}],
        ),
    ],
)
def test_sinks_are_names_or_mappings(given: Any, sinks: list[dict[str, Any]]) -> None:
    assert list(validate(MetricsConfig, {"sinks": given}, "metrics").sinks) == sinks


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"sinks": ["tensorbord"]}, r"metrics.sinks: unknown sink 'tensorbord'; did you mean 'tensorboard'\?"),
        ({"sinks": [{"kind": "wandb", "projekt": "p"}]}, "metrics.sinks: wandb: unknown field 'projekt'; did you mean"),
        ({"sinks": [{"kind": "wandb", "mode": "of"}]}, "metrics.sinks: wandb.mode: expected 'online' or 'offline'"),
        ({"sinks": ["jsonl"]}, "metrics.sinks: 'jsonl': metrics.jsonl is always written; leave it out"),
        ({"sinks": ["console"]}, "metrics.sinks: 'console': the console is always written; leave it out"),
        ({"sinks": ["wandb", {"kind": "wandb"}]}, "metrics.sinks: 'wandb' is there twice"),
        ({"sinks": [3]}, "metrics.sinks: expected names or mappings with 'kind', got 3"),
        ({"sinks": True}, "metrics.sinks: expected names or mappings with 'kind', got True"),
        ({"sinks": ["json:dumps"]}, "metrics.sinks: 'json:dumps' is no sink: a class derived from"),
        ({"sink": []}, "metrics: unknown field 'sink'; did you mean 'sinks'"),
        ({"alarms": "on"}, "metrics.alarms: "),
        ({"alarms": {"windows": 3}}, "metrics.alarms: unknown field 'windows'; did you mean 'window'"),
        ({"alarms": {"off": ["entropy"]}}, "metrics.alarms.off: unknown alarm 'entropy'"),
        ({"alarms": {"window": 2}}, "metrics.alarms.window: expected greater than or equal to 5"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        validate(MetricsConfig, given, "metrics")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "alarms"),
    [(True, AlarmConfig()), (False, None), ({"deviations": 9}, AlarmConfig(deviations=9.0))],
)
def test_alarms_are_on_off_or_set(given: Any, alarms: AlarmConfig | None) -> None:
    assert validate(MetricsConfig, {"alarms": given}, "metrics").alarms == alarms


def test_a_package_that_is_missing_is_told_with_how_to_get_it() -> None:
    config = validate(MetricsConfig, {"sinks": [f"{__name__}:Elsewhere"]}, "metrics")
    with pytest.raises(UserError, match=r"needs the package 'no_such_package'.*pip install no_such_package"):
        config.require_packages()
    with pytest.raises(UserError, match="no_such_package"):
        config.make_sinks()


def test_looking_at_sinks_imports_no_package_of_theirs() -> None:
    program = (
        "import sys; from stepgym.train.sinks import SINKS; assert 'stepgym.train.sinks.wandb' not in sys.modules;"
        "[SINKS.get(name) for name in ('tensorboard', 'trackio', 'wandb')];"
        "assert not {'torch', 'tensorboard', 'trackio', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
