from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stepgym.config import (
    config_digest,
    config_model,
    describe,
    error_line,
    keyword_parameters,
    to_jsonable,
    validate,
    validate_kwargs,
)
from stepgym.errors import UserError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Part:
    size: int
    name: str = "part"


class Extra(TypedDict):
    count: int


class Thing:
    """A thing.

    Args:
        max_turns: How many turns
            there are.
        kind: Which kind.
    """

    def __init__(
        self,
        *,
        max_turns: int = 6,
        kind: Literal["tags", "tools"] = "tags",
        numbers: tuple[int, ...] = (),
        color: Color = Color.RED,
        part: Part | None = None,
        schema: str = "plain",
        either: int | list[int] | None = None,
        extra: Extra | None = None,
        parts: dict[str, Part] | None = None,
        folder: Path = Path("."),
        rate: float = 1e-3,
        _private: int = 0,
    ) -> None:
        self.max_turns = max_turns


class Wider(Thing):
    """A wider thing.

    Args:
        width: How wide.
    """

    def __init__(self, *, width: float, **rest: Any) -> None:
        super().__init__(**rest)
        self.width = width


class Narrow(Thing):
    def __init__(self, *, depth: int = 1) -> None:
        super().__init__()


def function(group: list[float], *, scale: bool = True, power: float = 1.0) -> float:
    """Compute.

    Args:
        group: Not a field.
        scale: Whether to scale.
    """
    return power


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"max_turn": 3}, "env: unknown field 'max_turn'; did you mean 'max_turns'? Known: max_turns, kind, numbers, "),
        ({"zzz": 3}, "env: unknown field 'zzz'; known: max_turns, "),
        ({"_private": 3}, "env: unknown field '_private'"),
        ({"max_turns": "six"}, "env.max_turns: expected an integer, got 'six'"),
        ({"max_turns": None}, "env.max_turns: expected an integer, got None"),
        ({"kind": "tag"}, "env.kind: expected 'tags' or 'tools', got 'tag'"),
        ({"numbers": [1, "z"]}, "env.numbers[1]: expected an integer, got 'z'"),
        ({"color": "green"}, "env.color: expected 'red' or 'blue', got 'green'"),
        ({"part": {"sise": 1}}, "env.part: the field 'size' is missing; unknown field 'sise'; did you mean 'size'?"),
        ({"part": {"size": "q"}}, "env.part.size: expected an integer, got 'q'"),
        ({"either": "x"}, "env.either: expected an integer or a list, got 'x'"),
        ({"extra": {"count": 1, "cuont": 2}}, "env.extra: unknown field 'cuont'; did you mean 'count'? Known: count"),
        ({"parts": {"a": {"size": 1, "nme": "x"}}}, "env.parts.a: unknown field 'nme'; did you mean 'name'?"),
        ({"a1": 1, "a2": 2, "a3": 3}, "unknown too: 'a2', 'a3'"),
        ({"schema": 5}, "env.schema: expected a string, got 5"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_path(config: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        validate_kwargs(Thing, config, "env")
    assert line in str(caught.value)
    assert str(caught.value).startswith("env")
    assert "\n" not in str(caught.value)


def test_values_become_what_the_hints_say_and_defaults_stay_out() -> None:
    config = {
        "numbers": [1, 2],
        "color": "blue",
        "part": {"size": 2},
        "folder": "/tmp",
        "rate": 1,
        "extra": {"count": 1},
    }
    kwargs = validate_kwargs(Thing, config, "env")
    assert kwargs == {
        "numbers": (1, 2),
        "color": Color.BLUE,
        "part": Part(2),
        "folder": Path("/tmp"),
        "rate": 1.0,
        "extra": {"count": 1},
    }
    assert isinstance(kwargs["rate"], float)
    assert validate_kwargs(Thing, None, "env") == {}


def test_a_constructor_that_passes_kwargs_on_has_its_parents_fields_too() -> None:
    assert list(keyword_parameters(Wider)) == ["width", *keyword_parameters(Thing)]
    assert validate_kwargs(Wider, {"width": 2, "max_turns": 3}, "env") == {"width": 2.0, "max_turns": 3}
    assert list(keyword_parameters(Narrow)) == ["depth"]
    with pytest.raises(UserError, match=r"recipes/x\.yaml: env: the field 'width' is missing"):
        validate_kwargs(Wider, {}, "recipes/x.yaml: env")


def test_a_function_has_a_config_too() -> None:
    assert validate_kwargs(function, {"scale": False}, "credit") == {"scale": False}
    assert [(field.name, field.doc) for field in describe(function)] == [("scale", "Whether to scale."), ("power", "")]


def test_a_name_of_a_file_is_set_apart() -> None:
    with pytest.raises(UserError, match=r"^x\.yaml: max_turns: expected an integer"):
        validate_kwargs(Thing, {"max_turns": "x"}, "x.yaml:")
    with pytest.raises(UserError, match=r"^x\.yaml: unknown field"):
        validate_kwargs(Thing, {"nope": "x"}, "x.yaml:")
    with pytest.raises(UserError, match=r"^env: expected a mapping of fields, got 5"):
        validate_kwargs(Thing, 5, "env")  # type: ignore[arg-type]


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rate: float = Field(1e-3, gt=0, description="How fast.")


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner = Inner()
    many: list[Inner] = []
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _ordered(self) -> Outer:
        if self.low > self.high:
            raise ValueError("low must not be over high")
        return self


def test_pydantic_models_are_validated_with_the_same_lines() -> None:
    assert config_model(Outer) is Outer
    assert validate(Outer, {"inner": {"rate": 1}}, "train").inner.rate == 1.0
    assert validate(Outer, None, "train") == Outer()
    for config, line in (
        ({"inner": {"rat": 1}}, "train.inner: unknown field 'rat'; did you mean 'rate'? Known: rate"),
        ({"inner": {"rate": 0}}, "train.inner.rate: expected greater than 0, got 0"),
        ({"many": [{}, {"rate": "x"}]}, "train.many[1].rate: expected a number, got 'x'"),
        ({"low": 3}, "train: low must not be over high"),
    ):
        with pytest.raises(UserError) as caught:
            validate(Outer, config, "train")
        assert str(caught.value) == line


def test_long_errors_are_cut() -> None:
    with pytest.raises(UserError) as caught:
        validate_kwargs(Thing, {"max_turns": "x" * 10_000, "rate": "a", "schema": 1, "kind": 2, "either": "x"}, "env")
    assert len(str(caught.value)) < 500
    assert "and 2 more" in str(caught.value)


def test_describe_tells_name_type_default_and_doc() -> None:
    fields = {field.name: field for field in describe(Wider)}
    assert list(fields)[:3] == ["width", "max_turns", "kind"]
    assert fields["width"].required
    assert fields["width"].doc == "How wide."
    assert fields["max_turns"].doc == "How many turns there are."
    assert {name: fields[name].type for name in ("kind", "numbers", "color", "part", "either", "parts", "folder")} == {
        "kind": "'tags' | 'tools'",
        "numbers": "tuple[int, ...]",
        "color": "'red' | 'blue'",
        "part": "Part | None",
        "either": "int | list[int] | None",
        "parts": "dict[str, Part] | None",
        "folder": "Path",
    }
    assert fields["color"].to_dict()["default"] == "red"
    assert describe(Outer)[0].to_dict()["default"] == {"rate": 1e-3}
    assert describe(Inner)[0].doc == "How fast."


def test_hints_that_cannot_be_a_config_are_one_line() -> None:
    class Bad:
        def __init__(self, *, where: Nowhere = None) -> None:  # type: ignore[name-defined]  # noqa: F821
            pass

    with pytest.raises(TypeError, match="Bad: the type hint 'Nowhere' cannot be resolved"):
        config_model(Bad)


def test_a_digest_depends_on_values_and_on_nothing_else() -> None:
    assert config_digest({"a": 1, "b": [1.5, None]}) == config_digest({"b": (1.5, None), "a": 1})
    assert config_digest({"color": Color.RED}) == config_digest({"color": "red"})
    assert config_digest(Outer()) == config_digest(Outer().model_dump())
    assert config_digest({"a": 1}) != config_digest({"a": 2}) != config_digest({"a": "2"})
    assert len(config_digest({})) == 64
    assert config_digest({"a": 1e-6, "b": ["x", True]}) == config_digest({"b": ["x", True], "a": 0.000001})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_plain_configs_are_json_already(config: dict[str, Any]) -> None:
    assert to_jsonable(config) == config
    reordered = dict(reversed(list(config.items())))
    assert config_digest(reordered) == config_digest(config)


@given(st.dictionaries(st.sampled_from([*keyword_parameters(Thing), "max_turn", "x"]), values, max_size=3))
def test_any_config_is_taken_or_refused_in_one_line(config: dict[str, Any]) -> None:
    line = "env"
    try:
        validate_kwargs(Thing, config, "env")
    except UserError as error:
        line = str(error)
    assert line.startswith("env")
    assert len(line.splitlines()) == 1


def test_error_line_works_without_knowing_what_was_given() -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"rat": 1}})
    assert error_line(caught.value, "here") == "here.inner: unknown field 'rat'; known: none"
