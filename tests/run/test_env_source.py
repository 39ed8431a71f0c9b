"""A source makes a fresh environment each time, and its id and config make the same again."""

from __future__ import annotations

import gymnasium
import pytest
from stepgym_sql.env import SQLEnv

from stepgym.env.base import Env
from stepgym.env.registry import make
from stepgym.errors import UserError
from stepgym.run.env_source import EnvSource


class Sized(Env):
    """Has one field."""

    def __init__(self, *, size: int = 1) -> None:
        self.size = size


def test_from_an_id() -> None:
    source = EnvSource.of("sql", max_turns=3)
    one, two = source.make(), source.make()
    assert one is not two
    assert isinstance(one, SQLEnv)
    assert (source.id, dict(source.config)) == ("stepgym/sql-v0", {"max_turns": 3})
    assert one.get_wrapper_attr("max_turns") == 3
    assert type(make(source.id, **source.config)) is SQLEnv


def test_from_a_class() -> None:
    source = EnvSource.of(Sized, size=2)
    assert source.id == f"{__name__}:Sized"
    assert source.make().get_wrapper_attr("size") == 2
    assert EnvSource.of(source) is source


def test_from_a_function_that_wraps() -> None:
    source = EnvSource.of(lambda: gymnasium.wrappers.TransformReward(Sized(), lambda reward: reward))
    assert isinstance(source.make(), gymnasium.Wrapper)
    assert isinstance(source.make().unwrapped, Sized)
    assert source.id.endswith("<lambda>")


@pytest.mark.parametrize(
    ("env", "config", "message"),
    [
        ("sqll", {}, "did you mean 'sql'"),
        ("sql", {"max_turn": 1}, "unknown field 'max_turn'"),
        (Sized, {"sise": 1}, "Sized.*did you mean 'size'"),
        (Sized, {"size": "big"}, "size.*an integer"),
        (lambda: Sized(), {"size": 1}, "not with a function"),
        (3, {}, "not int"),
        ("nowhere:Env", {}, "no module 'nowhere'"),
        ("json:dumps", {}, "not a subclass"),
    ],
)
def test_what_is_none_is_one_clear_line(env: object, config: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnvSource.of(env, **config)  # type: ignore[arg-type]
