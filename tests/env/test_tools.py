from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from stepgym import ActionError, ToolEnv, tool


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(TypedDict):
    x: int
    label: NotRequired[str]


class Line(TypedDict):
    ends: list[Point]


@dataclasses.dataclass
class Box:
    size: int
    name: str = "box"


class Filter(BaseModel):
    column: str
    values: list[int] = Field(default_factory=list)


class Everything(ToolEnv):
    @tool
    def plain(self, text: str, count: int, ratio: float, flag: bool) -> str:
        """Take the four plain types."""
        return text

    @tool
    def optional(self, a: int | None = None, b: str = "b", c: int | str = 0) -> str:
        """Take what may be left out."""
        return "x"

    @tool
    def choices(self, color: Color, mode: Literal["fast", "slow"] = "fast") -> str:
        """Choose."""
        return color.value

    @tool
    def collections(self, items: list[int], pair: tuple[int, str], table: dict[str, list[float]]) -> str:
        """Collect."""
        return "x"

    @tool
    def nested(self, line: Line, box: Box, where: Filter | None = None) -> str:
        """Nest."""
        return "x"


def parameters(cls: type[ToolEnv], name: str) -> dict[str, Any]:
    schema = {entry["function"]["name"]: entry for entry in cls.tools}[name]
    assert schema["type"] == "function"
    return schema["function"]["parameters"]


def parse(name: str, arguments: object, cls: type[ToolEnv] = Everything) -> dict[str, Any]:
    return cls._tools[name].parse(arguments)


def test_plain_types_have_plain_schemas() -> None:
    assert parameters(Everything, "plain") == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
        },
        "required": ["text", "count", "ratio", "flag"],
        "additionalProperties": False,
    }


def test_what_has_a_default_is_not_required_and_shows_it() -> None:
    schema = parameters(Everything, "optional")
    assert "required" not in schema
    assert schema["properties"]["a"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert schema["properties"]["b"] == {"type": "string", "default": "b"}


def test_enums_and_literals_are_enums() -> None:
    properties = parameters(Everything, "choices")["properties"]
    assert properties["color"]["enum"] == ["red", "blue"]
    assert properties["mode"]["enum"] == ["fast", "slow"]
    assert parse("choices", '{"color": "blue"}') == {"color": Color.BLUE}


def test_nested_types_are_put_in_place_without_references() -> None:
    schema = parameters(Everything, "nested")
    assert "$ref" not in json.dumps(schema)
    assert "$defs" not in schema
    assert schema["properties"]["line"]["properties"]["ends"]["items"]["required"] == ["x"]
    checked = parse("nested", {"line": {"ends": [{"x": 1}]}, "box": {"size": 2}, "where": {"column": "a"}})
    assert checked == {"line": {"ends": [{"x": 1}]}, "box": Box(2), "where": Filter(column="a")}


def test_a_recursive_type_keeps_its_definition() -> None:
    class Walk(ToolEnv):
        @tool
        def walk(self, tree: Tree) -> str:
            """Walk."""
            return "x"

    schema = parameters(Walk, "walk")
    jsonschema.Draft202012Validator.check_schema(schema)
    value = {"tree": {"name": "a", "children": [{"name": "b", "children": []}]}}
    jsonschema.validate(value, schema)
    assert parse("walk", value, Walk)["tree"].children[0].name == "b"


class Tree(BaseModel):
    name: str
    children: list[Tree]


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("plain", {"text": "a", "count": "5", "ratio": 1, "flag": True}, "plain.count: expected an integer, got '5'"),
        ("plain", {"text": "a", "count": True, "ratio": 1, "flag": True}, "plain.count: expected an integer, got True"),
        ("plain", {"text": 5, "count": 1, "ratio": 1, "flag": True}, "plain.text: expected a string, got 5"),
        ("plain", {"text": "a", "count": 1, "ratio": 1, "flag": 1}, "plain.flag: expected a boolean, got 1"),
        ("plain", {"text": "a", "count": 1, "ratio": 1}, "plain: the field 'flag' is missing"),
        ("optional", {"bb": 1}, "optional: unknown field 'bb'; did you mean 'b'? Known: a, b, c"),
        ("optional", {"c": 1.5}, "optional.c: expected an integer or a string, got 1.5"),
        ("choices", {"color": "green"}, "choices.color: expected 'red' or 'blue', got 'green'"),
        ("nested", {"line": {"ends": [{"x": "1"}]}, "box": {"size": 1}}, "nested.line.ends[0].x: expected an integer"),
        ("nested", {"line": {"ends": []}, "box": {"sise": 1}}, "unknown field 'sise'; did you mean 'size'?"),
        ("optional", "{", "the arguments are not JSON"),
        ("optional", "[]", "must be a JSON object, not list"),
        ("optional", '{"a": NaN}', "NaN is not JSON"),
        ("optional", 5, "must be a JSON object, not int"),
        ("optional", "[" * 100_000, "nested too deep"),
        ("optional", {"a": object()}, "are not JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_malformed(name: str, arguments: object, problem: str) -> None:
    with pytest.raises(ActionError) as caught:
        parse(name, arguments)
    assert caught.value.status == "malformed"
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_text_and_mappings_are_checked_alike() -> None:
    given_values = {"items": [1, 2], "pair": [1, "a"], "table": {"a": [1.5]}}
    expected = {"items": [1, 2], "pair": (1, "a"), "table": {"a": [1.5]}}
    assert parse("collections", given_values) == parse("collections", json.dumps(given_values)) == expected
    assert parse("optional", "") == parse("optional", None) == parse("optional", {}) == {}


@pytest.mark.parametrize(
    "docstring",
    [
        "Find.\n\nLonger text.\n\nArgs:\n    query: What to find.\n    limit: How many.",
        "Find.\n\nLonger text.\n\nParameters\n----------\nquery : str\n    What to find.\nlimit : int\n    How many.",
        "Find.\n\nLonger text.\n\n:param query: What to find.\n:param limit: How many.",
    ],
    ids=["google", "numpy", "rest"],
)
def test_descriptions_come_from_the_docstring(docstring: str) -> None:
    def find(self: object, query: str, limit: int = 3) -> str:
        return "x"

    find.__doc__ = docstring
    cls = type("Finder", (ToolEnv,), {"find": tool(find)})
    function = cls.tools[0]["function"]
    assert function["description"] == "Find.\n\nLonger text."
    assert function["parameters"]["properties"]["query"]["description"] == "What to find."
    assert function["parameters"]["properties"]["limit"] == {
        "type": "integer",
        "description": "How many.",
        "default": 3,
    }


def test_annotated_describes_a_parameter_and_limits_it() -> None:
    class Limited(ToolEnv):
        @tool
        def go(self, steps: Annotated[int, "how far", Field(ge=1)]) -> str:
            """Go."""
            return "x"

    assert parameters(Limited, "go")["properties"]["steps"] == {
        "type": "integer",
        "minimum": 1,
        "description": "how far",
    }
    with pytest.raises(ActionError, match="greater than or equal to 1"):
        parse("go", {"steps": 0}, Limited)


def test_parameters_may_have_the_names_of_pydantics_methods() -> None:
    class Odd(ToolEnv):
        @tool
        def odd(self, copy: int, schema: int, model_config: int, json: int = 0) -> str:
            """Take odd names."""
            return "x"

    assert list(parameters(Odd, "odd")["properties"]) == ["copy", "schema", "model_config", "json"]
    values = {"copy": 1, "schema": 2, "model_config": 3}
    assert parse("odd", values, Odd) == values


def test_types_of_an_enclosing_function_are_found() -> None:
    class Local(enum.Enum):
        ONE = 1

    class Here(ToolEnv):
        @tool(agent_errors=(KeyError,))
        def go(self, which: Local) -> str:
            """Go."""
            return "x"

    assert parse("go", {"which": 1}, Here) == {"which": Local.ONE}


def test_bad_signatures_are_refused_when_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match=r"'\*words' .* cannot be called by name"):

        class Stars(ToolEnv):
            @tool
            def go(self, *words: str) -> str:
                return "x"

    with pytest.raises(TypeError, match="the parameter 'where' needs a type hint"):

        class NoHint(ToolEnv):
            @tool
            def go(self, where) -> str:  # type: ignore[no-untyped-def]
                return "x"

    with pytest.raises(TypeError, match="'Nowhere' cannot be resolved"):

        class NoType(ToolEnv):
            @tool
            def go(self, where: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
                return "x"

    with pytest.raises(TypeError, match="cannot be described to a model"):

        class NoSchema(ToolEnv):
            @tool
            def go(self, where: object()) -> str:  # type: ignore[valid-type]
                return "x"

    with pytest.raises(TypeError, match="put @tool nearest to the def"):

        class Static(ToolEnv):
            @tool
            @staticmethod
            def go(where: int) -> str:
                return "x"

    with pytest.raises(TypeError, match="tuple of exception classes"):

        class NoErrors(ToolEnv):
            @tool(agent_errors=(5,))  # type: ignore[arg-type]
            def go(self, where: int) -> str:
                return "x"


def test_subclasses_inherit_replace_and_remove_tools() -> None:
    class Base(ToolEnv):
        @tool
        def one(self, a: int) -> str:
            """One."""
            return "x"

        @tool
        def two(self, a: int) -> str:
            """Two."""
            return "x"

    class Changed(Base):
        two = None  # type: ignore[assignment]

        @tool
        def one(self, b: int) -> str:  # type: ignore[override]
            """Another one."""
            return "y"

    assert [entry["function"]["name"] for entry in Base.tools] == ["one", "two"]
    assert [entry["function"]["description"] for entry in Changed.tools] == ["Another one."]
    with pytest.raises(TypeError, match="overrides a tool without @tool"):

        class Forgotten(Base):
            def one(self, a: int) -> str:
                return "z"

    with pytest.raises(TypeError, match="two tools are called 'one'"):

        class Twice(Base):
            @tool(name="one")
            def other(self, a: int) -> str:
                """Other."""
                return "z"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer())
    | st.sampled_from(["red", "fast", "", "5", "naïve"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "label", "size"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(sorted(Everything._tools)), st.data())
def test_the_schema_and_the_check_agree(name: str, data: st.DataObject) -> None:
    schema = parameters(Everything, name)
    fields = st.sampled_from([*schema["properties"], "surprise"])
    fitting = {
        "line": st.just({"ends": [{"x": 1}]}),
        "box": st.just({"size": 1}),
        "pair": st.just([1, "a"]),
        "table": st.just({"a": [1]}),
        "items": st.just([1]),
    }
    arguments = {key: data.draw(fitting.get(key, st.nothing()) | json_values) for key in schema.get("required", [])}
    arguments |= data.draw(st.dictionaries(fields, json_values, max_size=2))
    fits = jsonschema.Draft202012Validator(schema).is_valid(arguments)
    try:
        parse(name, json.dumps(arguments))
    except ActionError:
        assert not fits
    else:
        assert fits
