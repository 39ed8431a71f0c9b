"""Functions as tools: a JSON schema from signature, type hints and docstring, and arguments checked against it."""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from stepgym.config import error_line
from stepgym.errors import ActionError
from stepgym.hints import local_names, resolve_hints

if TYPE_CHECKING:
    from pydantic import BaseModel

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_MARK = "__stepgym_tool__"


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the decorator leaves on a function until the class that it belongs to is complete."""

    name: str
    agent_errors: tuple[type[Exception], ...]
    names: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """One tool of an environment.

    Attributes:
        name: The name under which a model calls it.
        attribute: The name of the method.
        schema: Its description in the OpenAI format, `{"type": "function", "function": {...}}`.
        agent_errors: Exceptions that are the agent's fault: their text becomes the tool's result.
        model: The pydantic model that checks arguments; the schema was made from it, so both agree.
    """

    name: str
    attribute: str
    schema: dict[str, Any]
    agent_errors: tuple[type[Exception], ...]
    model: type[BaseModel]

    def parse(self, arguments: object) -> dict[str, Any]:
        """The keyword arguments to call the method with.

        Args:
            arguments: A JSON text, as models send it, or a mapping. Empty text stands for no arguments.

        Raises:
            ActionError: With the status `malformed` and one line for the agent, when they do not fit the schema.
                Nothing is converted that JSON can tell apart: `"5"` is no integer.
        """
        from pydantic import ValidationError

        given = _as_json(self.name, arguments)
        try:
            # JSON, not Python values: in strict mode only JSON input may become an Enum, a tuple or a date.
            checked = self.model.model_validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            problem = error_line(error, self.name, self.model, given)
            raise ActionError(problem, status="malformed") from None
        fields = self.model.model_fields
        return {str(fields[name].alias): getattr(checked, name) for name in fields if name in checked.model_fields_set}


@overload
def tool(function: FunctionT, /) -> FunctionT: ...
@overload
def tool(
    *, agent_errors: tuple[type[Exception], ...] = (), name: str | None = None
) -> Callable[[FunctionT], FunctionT]: ...
def tool(function: Any = None, /, *, agent_errors: tuple[type[Exception], ...] = (), name: str | None = None) -> Any:
    """Make a method of a `ToolEnv` a tool of the environment: `@tool`, or `@tool(agent_errors=(KeyError,))`.

    The description comes from the docstring (Google, NumPy or reST style), the parameters from the type hints: str,
    int, float, bool, Optional and defaults, Literal, Enum, list, tuple, dict, unions, and nested TypedDicts,
    dataclasses and pydantic models. `Annotated[int, "what it is"]` describes a parameter too. A result that is not
    text is sent as JSON. The method may be a coroutine function.

    Args:
        function: The method.
        agent_errors: Exceptions that are the agent's fault. Their text is the tool's result; any other exception
            except `ActionError` is a failure of the environment.
        name: The name that models see, where it is not the method's own.

    Raises:
        TypeError: The signature cannot be a tool: `*args`, a missing hint, a type that JSON cannot express. Some of
            it is seen only when the class is complete.
    """
    frame = sys._getframe(1)
    if function is None:
        return lambda decorated: _marked(decorated, agent_errors, name, frame)
    return _marked(function, agent_errors, name, frame)


def _marked(function: Any, agent_errors: tuple[type[Exception], ...], name: str | None, frame: types.FrameType) -> Any:
    if not inspect.isfunction(function):
        raise TypeError(f"@tool is for methods, not for {type(function).__name__}: put @tool nearest to the def")
    label = f"tool {function.__qualname__}"
    if not isinstance(agent_errors, tuple) or not all(
        isinstance(error, type) and issubclass(error, Exception) for error in agent_errors
    ):
        raise TypeError(f"{label}: agent_errors must be a tuple of exception classes, got {agent_errors!r}")
    for parameter in _arguments(function, label):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            plain = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
            raise TypeError(f"{label}: {plain!r} ({parameter.kind.description}) cannot be called by name")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"{label}: the parameter {parameter.name!r} needs a type hint")
    mark = _Mark(name or function.__name__, tuple(agent_errors), local_names(function, frame))
    setattr(function, _MARK, mark)
    return function


def _arguments(function: Callable[..., Any], label: str) -> list[inspect.Parameter]:
    """The parameters without `self`."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    ):
        raise TypeError(f"{label}: a tool is a method, and its first parameter is self")
    return parameters[1:]


def tools_of(cls: type) -> dict[str, Tool]:
    """The tools that a class defines or inherits, by name, base classes first, in the order of their definition.

    A subclass removes a tool by setting the method to None. Raises `TypeError` when one overrides a tool without
    `@tool`, when two tools have one name, or for a signature that cannot be a tool.
    """
    attributes = {name: None for base in reversed(cls.__mro__) for name in base.__dict__}
    tools: dict[str, Tool] = {}
    for attribute in attributes:
        value = inspect.getattr_static(cls, attribute)
        mark = getattr(value, _MARK, None) if inspect.isfunction(value) else None
        if mark is None:
            was_tool = any(hasattr(base.__dict__.get(attribute), _MARK) for base in cls.__mro__)
            if was_tool and value is not None:
                raise TypeError(
                    f"{cls.__qualname__}.{attribute} overrides a tool without @tool; decorate it too, or set it to None"
                )
            continue
        if mark.name in tools:
            raise TypeError(f"{cls.__qualname__}: two tools are called {mark.name!r}")
        tools[mark.name] = build_tool(value, attribute)
    return tools


def build_tool(function: Callable[..., Any], attribute: str | None = None) -> Tool:
    """The `Tool` of a method that `@tool` has marked. Raises `TypeError` in one line for hints JSON cannot express."""
    from docstring_parser import parse
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    mark: _Mark = getattr(function, _MARK)
    label = f"tool {function.__qualname__}"
    hints = resolve_hints(function, label, mark.names)
    docstring = parse(inspect.cleandoc(function.__doc__ or ""))
    described = {parameter.arg_name: parameter.description or "" for parameter in docstring.params}
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(_arguments(function, label)):
        hint = hints[parameter.name]
        description = _annotated_text(hint) or " ".join(described.get(parameter.name, "").split()) or None
        default = ... if parameter.default is parameter.empty else parameter.default
        # Fields have names of their own and the parameter's as alias: a parameter may be called `copy` or `schema`.
        fields[f"argument_{index}"] = (hint, Field(default, alias=parameter.name, description=description))
    options = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    try:
        model = create_model(mark.name, __config__=options, **fields)
        with warnings.catch_warnings():
            # A default that JSON cannot express is left out of the schema; the parameter stays optional.
            warnings.simplefilter("ignore")
            parameters = model.model_json_schema(by_alias=True)
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise TypeError(f"{label}: a type hint cannot be described to a model: {reason}") from None
    text = "\n\n".join(part for part in (docstring.short_description, docstring.long_description) if part)
    schema = {
        "type": "function",
        "function": {"name": mark.name, "description": text, "parameters": _plain_schema(parameters)},
    }
    return Tool(mark.name, attribute or function.__name__, schema, mark.agent_errors, model)


def _annotated_text(hint: Any) -> str | None:
    """The plain text in `Annotated[int, "what it is"]`, a common way to describe a parameter."""
    if typing.get_origin(hint) is typing.Annotated:
        for extra in hint.__metadata__:
            if isinstance(extra, str):
                return extra
            if getattr(extra, "description", None):
                return str(extra.description)
    return None


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as chat templates and servers like it: no titles, no null defaults, references put in place.

    Recursive definitions cannot be put in place; they keep their reference and their definition.
    """
    definitions = schema.pop("$defs", {})
    kept: set[str] = set()

    def plain(value: Any, above: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [plain(item, above) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("$ref"), str):
            name = value["$ref"].rpartition("/")[2]
            if name in above:
                kept.add(name)
                return {"$ref": value["$ref"]}
            rest = {key: item for key, item in value.items() if key != "$ref"}
            return {**plain(definitions[name], (*above, name)), **plain(rest, above)}
        result: dict[str, Any] = {}
        for key, item in value.items():
            if key == "properties":
                result[key] = {name: plain(property_, above) for name, property_ in item.items()}
            elif key == "title" or (key == "default" and item is None):
                continue
            else:
                result[key] = item if key in ("default", "enum", "const", "examples") else plain(item, above)
        return result

    flat: dict[str, Any] = plain(schema, ())
    flat.setdefault("properties", {})
    if kept:
        flat["$defs"] = {name: plain(definitions[name], (name,)) for name in sorted(kept)}
    return flat


def _as_json(name: str, arguments: object) -> Any:
    """What was sent as arguments, as JSON values. Raises `ActionError` with the status `malformed`."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            given = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
            raise ActionError(f"{name}: the arguments are not JSON: {reason}", status="malformed") from None
    else:
        given = dict(arguments) if isinstance(arguments, Mapping) else arguments
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise ActionError(f"{name}: the arguments must be a JSON object, not {kind}", status="malformed")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ActionError(f"{name}: the arguments are not JSON: {reason}", status="malformed") from None
    return given


def _no_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
