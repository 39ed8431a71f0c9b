"""Registries: names for things that are imported only when they are asked for."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast, overload

from stepgym.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C")


def suggestion(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of the known names, or an empty string when none is close."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def unknown(noun: str, name: object, known: Iterable[str]) -> str:
    """One line for a name that does not exist: `unknown engine 'vlm'; did you mean 'vllm'? Known: openai, vllm`."""
    names = list(known)
    listing = ", ".join(names) if names else "none"
    hint = suggestion(name, names)
    return f"unknown {noun} {name!r}{hint} Known: {listing}" if hint else f"unknown {noun} {name!r}; known: {listing}"


def import_target(target: str, what: str) -> Any:
    """Import what `module:Attribute` names. Raises `UserError`, beginning with `what`, when there is no such thing."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{what}: {target!r} is not of the form 'module:Name'")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = getattr(error, "name", None)
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise UserError(f"{what}: there is no module {missing!r}") from error
        raise UserError(f"{what}: importing {module_name!r} failed: {error}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            hint = suggestion(part, [name for name in dir(found) if not name.startswith("_")])
            raise UserError(f"{what}: {module_name!r} has no {attribute!r}{hint}") from None
    return found


def plugin_entry_points(group: str) -> dict[str, EntryPoint]:
    """The installed entry points of a group, by name. Of two with one name the first stands and a warning is logged."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in found and found[point.name].value != point.value:
            logger.warning(
                "%s: %r is offered twice; using %s, not %s", group, point.name, found[point.name].value, point.value
            )
        found.setdefault(point.name, point)
    return found


class Registry(Generic[T]):
    """Names of one kind of thing (engines, agents, algorithms), each either the thing itself or `module:Name`.

    A `module:Name` is imported when it is first asked for, so a registry costs nothing to look at. A name that is
    not registered but has the form `module:Name` is imported as such, so that people need not register what they use
    once.

    Args:
        noun: What an entry is called in messages, as in `unknown engine 'vlm'`.
        targets: Name to `module:Name`.
        group: Group of entry points that add names. They are read on first use; built-in names win over them.

    Example:
        >>> ENGINES = Registry("engine", {"openai": "stepgym.model.engines.openai:OpenAIEngine"})
        >>> ENGINES.get("openai")       # imports the module
    """

    def __init__(self, noun: str, targets: Mapping[str, str] | None = None, *, group: str | None = None) -> None:
        self.noun = noun
        self._group = group
        self._entries: dict[str, object] = dict(targets or {})
        self._plugins_read = group is None

    @overload
    def register(self, name: str) -> Callable[[C], C]: ...
    @overload
    def register(self, name: str, thing: C) -> C: ...
    def register(self, name: str, thing: Any = None) -> Any:
        """Add a name, as a decorator (`@ENGINES.register("mine")`) or with the thing or its `module:Name` given.

        Registering the same thing again does nothing. Raises `UserError` when the name stands for something else.
        """
        if thing is None:

            def decorate(decorated: C) -> C:
                self.register(name, decorated)
                return decorated

            return decorate
        present = self._entries.get(name)
        if present is not None and present != thing and _target_of(present) != _target_of(thing):
            raise UserError(f"{self.noun} {name!r} is already registered as {_target_of(present)}")
        self._entries[name] = thing
        return thing

    def get(self, name: str) -> T:
        """The thing of that name, imported if need be. Raises `UserError` with a suggestion for an unknown name."""
        if name not in self._known():
            if isinstance(name, str) and ":" in name:
                return cast(T, import_target(name, f"{self.noun} {name!r}"))
            raise UserError(unknown(self.noun, name, self.names()))
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = import_target(entry, f"{self.noun} {name!r}")
        return cast(T, entry)

    def target(self, name: str) -> str:
        """Where the thing of that name lives, as `module:Name`, without importing it."""
        if name not in self._known():
            raise KeyError(name)
        return _target_of(self._entries[name])

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._known())

    def _known(self) -> dict[str, object]:
        if not self._plugins_read:
            self._plugins_read = True
            for name, point in plugin_entry_points(cast(str, self._group)).items():
                self._entries.setdefault(name, point.value)
        return self._entries

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._known())


def _target_of(entry: object) -> str:
    if isinstance(entry, str):
        return entry
    return f"{getattr(entry, '__module__', '?')}:{getattr(entry, '__qualname__', repr(entry))}"
