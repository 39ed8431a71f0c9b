"""Finding environments by name, and registering them with Gymnasium.

Environments come from the entry points `stepgym.envs`: the name is the id (`stepgym/sql-v0`), the value `module:Class`.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from stepgym.errors import UserError
from stepgym.plugins import import_target, plugin_entry_points, unknown

if TYPE_CHECKING:
    from stepgym.env.base import Env

logger = logging.getLogger(__name__)
GROUP = "stepgym.envs"
_ID = re.compile(r"(?:[\w:.-]+/)?(?P<name>[\w:.-]+?)-v(?P<version>\d+)")


@cache
def _targets() -> dict[str, str]:
    return {name: point.value for name, point in plugin_entry_points(GROUP).items()}


def env_names() -> list[str]:
    """The ids of all installed environments, sorted."""
    return sorted(_targets())


def short_names() -> dict[str, str]:
    """Short name to id, as in `sql` to `stepgym/sql-v0`, for those that are unambiguous.

    A name without a version means its newest version; a name that two namespaces share has no short form.
    """
    newest: dict[str, dict[str, tuple[int, str]]] = {}
    for env_id in _targets():
        match = _ID.fullmatch(env_id)
        if match is None:
            continue
        namespace = env_id.rpartition("/")[0]
        versions = newest.setdefault(match["name"], {})
        candidate = (int(match["version"]), env_id)
        versions[namespace] = max(candidate, versions.get(namespace, candidate))
    return {name: next(iter(homes.values()))[1] for name, homes in newest.items() if len(homes) == 1}


def resolve_env_id(name: str) -> str:
    """The full id that a name stands for: an id, a short name, or `module:Class`, which is returned as it is.

    Raises `UserError` with a suggestion for an unknown name.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"an environment's name is text such as 'sql' or 'module:Class', not {name!r}")
    targets, short = _targets(), short_names()
    if name in targets:
        return name
    if name in short:
        return short[name]
    unversioned = [env_id for env_id in short.values() if env_id.rpartition("-v")[0] == name]
    if unversioned:
        return unversioned[0]
    if ":" in name:
        return name
    raise UserError(f"{unknown('environment', name, [*short, *sorted(targets)])} (or give 'module:Class')")


def env_target(env_id: str) -> str:
    """Where an installed environment lives, as `module:Class`. Raises `KeyError` for an unknown id."""
    return _targets()[env_id]


def env_class(name: str) -> type[Env]:
    """The class of an environment by id, short name or `module:Class`. Raises `UserError` when there is none."""
    from stepgym.env.base import Env

    env_id = resolve_env_id(name)
    found = import_target(_targets().get(env_id, env_id), f"environment {name!r}")
    if not (isinstance(found, type) and issubclass(found, Env)):
        raise UserError(f"environment {name!r}: {env_id!r} is not a subclass of stepgym.Env")
    return found


def make(env_id: str | type[Env], /, **config: Any) -> Env:
    """Make an environment.

    Args:
        env_id: Its id (`stepgym/sql-v0`), its short name (`sql`), `module:Class`, or the class itself.
        **config: The keyword-only parameters of its constructor.

    Raises:
        UserError: There is no such environment, or a field is unknown or does not fit its type.
    """
    from stepgym.config import validate_kwargs

    if isinstance(env_id, type):
        cls, where = env_id, env_id.__name__
    else:
        cls, where = env_class(env_id), "env"
    return cls(**validate_kwargs(cls, config, where))


def make_registered(*, stepgym_id: str, render_mode: str | None = None, **config: Any) -> Env:
    """What `gymnasium.make` calls for a registered environment: `make`, so that both check the config alike."""
    env = make(stepgym_id, **config)
    env.render_mode = render_mode
    return env


def register_gymnasium() -> None:
    """Register every installed environment with Gymnasium, as a string: none of them is imported.

    Gymnasium's own wrappers are left out: `Env` keeps the order and counts its turns itself. Ids that Gymnasium does
    not take are left out with a warning; they still work with `stepgym.make`. Safe to call twice.
    """
    from gymnasium.envs.registration import register, registry

    for env_id in env_names():
        if env_id in registry:
            continue
        if _ID.fullmatch(env_id) is None:
            logger.warning("the environment id %r is not of the form 'namespace/name-v0': unknown to Gymnasium", env_id)
            continue
        register(
            env_id,
            entry_point="stepgym.env.registry:make_registered",
            order_enforce=False,
            disable_env_checker=True,
            kwargs={"stepgym_id": env_id},
        )
