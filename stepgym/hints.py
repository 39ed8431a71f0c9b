"""Type hints of functions, resolved to types that pydantic can check."""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import typing_extensions


def resolve_hints(function: Callable[..., Any], name: str, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The type hints of a function, with `Annotated` kept and `typing.TypedDict`s that pydantic can read.

    Args:
        function: The function.
        name: What error messages begin with.
        names: Names that hints may use beside those of the function's module, as `local_names` finds them.

    Raises:
        TypeError: In one line, for a hint that cannot be resolved.
    """
    try:
        hints = typing.get_type_hints(function, localns=dict(names or {}), include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{name}: the type hint {error.name!r} cannot be resolved; import it, or define it above"
        ) from None
    except (TypeError, SyntaxError) as error:
        raise TypeError(f"{name}: a type hint is not a type: {error}") from None
    return {parameter: readable(hint) for parameter, hint in hints.items()}


def local_names(function: Callable[..., Any], frame: types.FrameType | None) -> dict[str, Any]:
    """The names in a function's hints that only the scopes around its definition know.

    Under `from __future__ import annotations` hints are text, and `typing.get_type_hints` looks only into the module;
    a class that is defined in a function would not be found.
    """
    wanted: set[str] = set()
    for hint in getattr(function, "__annotations__", {}).values():
        if isinstance(hint, str):
            try:
                wanted.update(compile(hint, "<hint>", "eval").co_names)
            except SyntaxError:
                continue
    found: dict[str, Any] = {}
    source = getattr(getattr(function, "__code__", None), "co_filename", "")
    while frame is not None and frame.f_code.co_filename == source and frame.f_code.co_name != "<module>":
        for name in wanted - set(found):
            if name in frame.f_locals:
                found[name] = frame.f_locals[name]
        frame = frame.f_back
    return found


def readable(hint: Any) -> Any:
    """The hint with every `typing.TypedDict` as one of typing_extensions; from Python 3.12 on as it is."""
    if sys.version_info >= (3, 12):
        return hint
    if typing.is_typeddict(hint):
        return _typed_dict(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is typing.Literal:
        return hint
    replaced = tuple(argument if isinstance(argument, list) else readable(argument) for argument in arguments)
    if all(new is old for new, old in zip(replaced, arguments, strict=True)):
        return hint
    if origin is typing.Annotated:
        return typing.Annotated[(replaced[0], *hint.__metadata__)]
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, replaced)
    if hasattr(hint, "copy_with"):
        return hint.copy_with(replaced)
    return origin[replaced]


@functools.cache
def _typed_dict(hint: Any) -> Any:
    if type(hint).__module__ == "typing_extensions":
        return hint
    fields: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(hint, include_extras=True).items():
        if typing.get_origin(kind) in (typing.Required, typing.NotRequired):
            wrapper, kind = typing.get_origin(kind), typing.get_args(kind)[0]
        else:
            wrapper = typing.Required if name in hint.__required_keys__ else typing.NotRequired
        fields[name] = wrapper[readable(kind)]
    make: Any = typing_extensions.TypedDict
    replaced = make(hint.__name__, fields)
    replaced.__doc__, replaced.__module__ = hint.__doc__, hint.__module__
    return replaced
