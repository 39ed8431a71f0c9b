"""Where a run's environments come from: a fresh one for every episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium

from stepgym.config import validate_kwargs
from stepgym.env.base import Env
from stepgym.env.registry import env_class, resolve_env_id
from stepgym.errors import UserError


@dataclass(frozen=True, slots=True)
class EnvSource:
    """Makes environments.

    Attributes:
        make: Makes a fresh one; it may be wrapped.
        id: How to ask for the same class again (`stepgym/sql-v0`, or `module:Class`).
        config: Its config, for the record.
    """

    make: Callable[[], gymnasium.Env[Any, Any]]
    id: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, env: EnvSource | str | type[Env] | Callable[[], gymnasium.Env[Any, Any]], **config: Any) -> EnvSource:
        """A source from an id with its config, an environment class with its config, or a function that makes one.

        Raises `UserError` for an unknown id, a bad config, or anything else.
        """
        if isinstance(env, EnvSource):
            return env
        if isinstance(env, str):
            found = env_class(env)
            fields = validate_kwargs(found, config, "env")
            return cls(lambda: found(**fields), resolve_env_id(env), dict(config))
        if isinstance(env, type) and issubclass(env, Env):
            own: type[Env] = env
            fields = validate_kwargs(own, config, own.__name__)
            return cls(lambda: own(**fields), f"{own.__module__}:{own.__qualname__}", dict(config))
        if callable(env):
            if config:
                raise UserError(f"config {sorted(config)} goes with an environment's id or class, not with a function")
            return cls(
                cast(Callable[[], gymnasium.Env[Any, Any]], env),
                f"{getattr(env, '__module__', '')}:{getattr(env, '__qualname__', repr(env))}",
            )
        raise UserError(f"an environment is an id, a class or a function that makes one, not {type(env).__name__}")
