"""Configuration: models built from signatures, YAML 1.2, overrides, digests, and one-line errors.

The keyword-only parameters of a constructor (or of a function) are its config. `config_model` makes a pydantic model of
them, so that recipes, `stepgym.make` and `gymnasium.make` take the same fields and check them alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import typing_extensions

from stepgym.errors import UserError
from stepgym.hints import resolve_hints
from stepgym.plugins import unknown
from stepgym.yaml_files import apply_overrides as apply_overrides
from stepgym.yaml_files import load_yaml as load_yaml
from stepgym.yaml_files import parse_yaml as parse_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

ModelT = TypeVar("ModelT", bound="BaseModel")
Target = type | Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigField:
    """One field of a config, as `stepgym list` shows it.

    Attributes:
        name: Its name.
        type: Its type as text.
        required: Whether it must be given.
        default: Its default value; None where it is required.
        doc: What the docstring says about it.
    """

    name: str
    type: str
    required: bool
    default: Any
    doc: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "name": self.name,
            "type": self.type,
            "required": self.required,
            "default": to_jsonable(self.default),
            "doc": self.doc,
        }


# ---- from a signature to a model ------------------------------------------------------------------------------------


def keyword_parameters(target: Target) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a class's constructor, or of a function, with annotations as they are written.

    Where a constructor passes `**kwargs` on, the parameters of the next constructor up are taken too. Names that
    begin with an underscore are private and left out.
    """
    parameters: dict[str, inspect.Parameter] = {}
    for function in _signature_chain(target):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not parameter.name.startswith("_"):
                parameters.setdefault(parameter.name, parameter)
    return parameters


def _signature_chain(target: Target) -> list[Callable[..., Any]]:
    """The functions whose parameters count: the constructor, and while it takes `**kwargs`, those above it."""
    if not isinstance(target, type):
        return [target]
    chain: list[Callable[..., Any]] = []
    for cls in target.__mro__:
        init = cls.__dict__.get("__init__")
        if cls is object or not inspect.isfunction(init):
            continue
        chain.append(init)
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            break
    return chain


def config_model(target: Target) -> type[BaseModel]:
    """A pydantic model (`extra="forbid"`) of the keyword-only parameters of a class's constructor or of a function.

    A class that is a pydantic model already is returned as it is. Raises `TypeError` for annotations that cannot be
    resolved or that pydantic cannot check.
    """
    return _config_model(target)


@lru_cache(maxsize=512)
def _config_model(target: Any) -> type[BaseModel]:
    from pydantic import BaseModel, ConfigDict, create_model
    from pydantic.errors import PydanticUserError

    if isinstance(target, type) and issubclass(target, BaseModel):
        return target
    name = getattr(target, "__name__", type(target).__name__)
    hints: dict[str, Any] = {}
    for function in reversed(_signature_chain(target)):
        hints.update(resolve_hints(function, name))
    fields: dict[str, Any] = {
        parameter.name: (
            hints.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in keyword_parameters(target).values()
    }
    options = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    try:
        with warnings.catch_warnings():
            # A parameter may be called `schema` or `copy`; that it hides an old method of pydantic's matters to nobody.
            warnings.filterwarnings("ignore", message=".*shadows an attribute in parent.*")
            model: type[BaseModel] = create_model(f"{name}Config", __config__=options, **fields)
    except (PydanticUserError, NameError) as error:
        raise TypeError(f"{name}: its parameters cannot be a config: {str(error).splitlines()[0]}") from error
    return model


def validate_kwargs(target: Target, config: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Check a mapping against the keyword-only parameters of `target`, and return the arguments to call it with.

    Only fields that were given are returned, converted to their types (a list to a tuple, text to an Enum). Raises
    `UserError` in one line that begins with `where`.
    """
    model = validate(config_model(target), config, where)
    return {name: getattr(model, name) for name in type(model).model_fields if name in model.model_fields_set}


def validate(model_class: type[ModelT], config: Any, where: str) -> ModelT:
    """Check a mapping against a pydantic model. None stands for an empty mapping.

    Args:
        model_class: The model.
        config: The mapping.
        where: Begins every message, as in `env.max_turns: ...`; end it with a colon where it is a file.

    Raises:
        UserError: In one line; an unknown field comes with a suggestion.
    """
    from pydantic import ValidationError

    if config is None:
        config = {}
    if not isinstance(config, Mapping | model_class):
        raise UserError(_at(where, "", f"expected a mapping of fields, got {_short(config)}"))
    try:
        return model_class.model_validate(config)
    except ValidationError as error:
        raise UserError(error_line(error, where, model_class, config)) from None


# ---- one line for what is wrong -------------------------------------------------------------------------------------


def error_line(error: ValidationError, where: str, known: Any = None, given: Any = None) -> str:
    """A pydantic error as one line: the path of each field that is wrong, and what would be right.

    Args:
        error: The error.
        where: Begins the line.
        known: The type that was validated, from which the known fields are named.
        given: What was validated; tells a field's path from the names of the types that were tried.
    """
    problems: dict[str, list[str]] = {}
    unknown_fields: dict[str, list[int | str]] = {}
    for problem in error.errors(include_url=False):
        kind = problem["type"]
        path = _path(problem["loc"], given, kind)
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            parent = _dotted(path[:-1])
            if parent in unknown_fields:
                unknown_fields[parent].append(path[-1])
                continue
            unknown_fields[parent] = []
            key, text = parent, unknown("field", path[-1], _known_fields(known, path[:-1]))
        elif kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
            key, text = _dotted(path[:-1]), f"the field {path[-1]!r} is missing"
        else:
            key, text = _dotted(path), _plain(problem["msg"])
            if kind not in ("value_error", "assertion_error", "union_tag_not_found", "json_invalid"):
                text += f", got {_short(problem['input'])}"
        texts = problems.setdefault(key, [])
        if text not in texts:
            texts.append(text)
    for parent, names in unknown_fields.items():
        if names:
            problems[parent].append(f"unknown too: {', '.join(repr(name) for name in names[:5])}")
    lines = [_at(where, path_text, _either(texts)) for path_text, texts in problems.items()]
    shown, more = lines[:3], len(lines) - 3
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _path(location: tuple[int | str, ...], given: Any, kind: str) -> list[int | str]:
    """The part of a pydantic location that names places in what was given; the rest names members of unions."""
    path: list[int | str] = []
    value = given
    for position, part in enumerate(location):
        last = position == len(location) - 1
        in_sequence = isinstance(part, int) and isinstance(value, list | tuple) and part < len(value)
        if in_sequence or (isinstance(value, Mapping) and part in value):
            value = value[part]
        elif given is not None and not (last and kind.startswith(("missing", "extra", "unexpected"))):
            continue
        path.append(part)
    return path


def _either(texts: list[str]) -> str:
    """`expected an integer, got 'x'` and `expected a list, got 'x'` as one: a union was tried member by member."""
    expectations = [text for text in texts if text.startswith("expected ") and ", got " in text]
    if len(expectations) > 1:
        got = expectations[0].rpartition(", got ")[2]
        wanted = " or ".join(text.removeprefix("expected ").rpartition(", got ")[0] for text in expectations)
        texts = [f"expected {wanted}, got {got}", *(text for text in texts if text not in expectations)]
    return "; ".join(texts)


def _plain(message: str) -> str:
    """A message of pydantic's in our words: `Input should be a valid integer, ...` becomes `expected an integer`."""
    for prefix in ("Value error, ", "Assertion failed, "):
        message = message.removeprefix(prefix)
    for start in ("Input should be ", "Input should "):
        if message.startswith(start):
            message = "expected " + message.removeprefix(start).split(", unable to parse")[0]
            message = message.replace("a valid integer", "an integer").replace("a valid array", "a list")
            return message.replace("a valid ", "a ")
    return " ".join(message.split())


def _known_fields(known: Any, path: list[int | str]) -> list[str]:
    """Names of the fields at a path below a type, looking through optionals, unions, lists and mappings."""
    from pydantic import BaseModel

    candidates = [known]
    for part in [*path, None]:
        candidates = [member for candidate in candidates for member in _members(candidate)]
        if part is None:
            # Where one mapping stands for a list of one, the path has no index.
            sequences = [c for c in candidates if typing.get_origin(c) in (list, tuple)]
            candidates = [c for c in candidates if c not in sequences]
            candidates += [member for c in sequences for element in _elements(c) for member in _members(element)]
            break
        below: list[Any] = []
        for candidate in candidates:
            if isinstance(part, str) and isinstance(candidate, type) and issubclass(candidate, BaseModel):
                below += [f.annotation for name, f in candidate.model_fields.items() if part in (name, f.alias)]
            elif isinstance(part, str) and part in (fields := _field_types(candidate)):
                below.append(fields[part])
            else:
                below += _elements(candidate)
        candidates = below
    names: dict[str, None] = {}
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            names.update(dict.fromkeys(field.alias or name for name, field in candidate.model_fields.items()))
        else:
            names.update(dict.fromkeys(_field_types(candidate)))
    return list(names)


def _elements(annotation: Any) -> list[Any]:
    """The type of what a list, a tuple or a mapping holds."""
    return [argument for argument in typing.get_args(annotation) if argument is not Ellipsis][-1:]


def _members(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself, without `Annotated`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(annotation) for member in _members(argument)]
    return [annotation]


def _field_types(candidate: Any) -> dict[str, Any]:
    if isinstance(candidate, type) and (
        dataclasses.is_dataclass(candidate) or typing_extensions.is_typeddict(candidate)
    ):
        return typing.get_type_hints(candidate)
    return {}


def _dotted(path: list[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _at(where: str, path: str, text: str) -> str:
    separator = " " if where.endswith(":") else "."
    place = separator.join(part for part in (where, path) if part)
    if not place:
        return text
    return f"{place} {text}" if place.endswith(":") else f"{place}: {text}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- showing a config -----------------------------------------------------------------------------------------------


def describe(target: Target) -> list[ConfigField]:
    """The fields of a config in the order of the signature, with what the docstrings say about them."""
    model = config_model(target)
    docs = _parameter_docs(target)
    return [
        ConfigField(
            name=name,
            type=type_name(field.annotation),
            required=field.is_required(),
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            doc=field.description or docs.get(name, ""),
        )
        for name, field in model.model_fields.items()
    ]


def type_name(annotation: Any) -> str:
    """A type as people write it: `int`, `list[str]`, `'tags' | 'tools'`, `int | None`."""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if annotation is Any:
        return "any"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(repr(member.value) for member in annotation)
    if origin is not None and arguments:
        inner = ", ".join("[...]" if isinstance(argument, list) else type_name(argument) for argument in arguments)
        return f"{getattr(origin, '__name__', str(origin))}[{inner}]"
    return str(getattr(annotation, "__name__", annotation))


def _parameter_docs(target: Target) -> dict[str, str]:
    from docstring_parser import ParseError, parse

    sources: list[Any] = [target]
    if isinstance(target, type):
        sources = [
            source for cls in target.__mro__ if cls is not object for source in (cls, cls.__dict__.get("__init__"))
        ]
    docs: dict[str, str] = {}
    for source in sources:
        try:
            parsed = parse(inspect.cleandoc(getattr(source, "__doc__", None) or ""))
        except ParseError:
            continue
        for parameter in parsed.params:
            for name in parameter.arg_name.split(","):
                docs.setdefault(name.strip(), " ".join((parameter.description or "").split()))
    return docs


# ---- digests --------------------------------------------------------------------------------------------------------


def to_jsonable(value: Any) -> Any:
    """A config value as plain JSON: models and dataclasses as mappings, Enums as their values, paths as text."""
    from pydantic import BaseModel

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(to_jsonable(key)): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_jsonable(item) for item in value), key=str)
    return str(value)


def config_digest(config: Any) -> str:
    """SHA-256, in hexadecimal, of a config as JSON with sorted keys: equal configs have equal digests."""
    text = json.dumps(to_jsonable(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
