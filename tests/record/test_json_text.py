from __future__ import annotations

import json
import math
from enum import StrEnum
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.json_text import MARK, dump_json, dump_text, load_json, load_text

text = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["\ud83d\ude00", "\x00", MARK, MARK + ":x", "\\ud800"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.integers() | st.none(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(values)
def test_every_value_comes_back_as_it_was(value):
    written = dump_json(value)
    written.encode("utf-8")
    assert load_json(written) == value
    json.loads(written)


@settings(deadline=None)
@given(text)
def test_every_string_comes_back_as_it_was(value):
    written = dump_text(value)
    written.encode("utf-8")
    assert load_text(written) == value


def test_plain_values_stay_plain_and_readable():
    value = {"role": "user", "content": "Größe 中文 😀", "tool_calls": [{"id": 1}]}
    assert json.loads(dump_json(value)) == value
    assert "中文" in dump_json(value)
    assert dump_text("Größe 中文") == "Größe 中文"


def test_huge_integers_come_back():
    for number in (10**4299, 10**4300, -(10**9000), 2**63, 2**64 + 1):
        assert load_json(dump_json({"n": number}))["n"] == number


def test_numbers_that_json_lacks_come_back():
    back = load_json(dump_json([math.nan, math.inf, -math.inf, -0.0]))
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back[3]) == -1
    assert "NaN" not in dump_json([math.nan])


def test_values_of_other_types_do_not_stop_the_writer():
    class Colour(StrEnum):
        RED = "red"

    value = {
        "tuple": (1, 2),
        "numpy": np.float32(0.5),
        "array": np.arange(3),
        "mapping": MappingProxyType({"a": 1}),
        "enum": Colour.RED,
        "object": {1, 2},
        (1, 2): "a tuple as key",
    }
    back = load_json(dump_json(value))
    assert back["tuple"] == [1, 2]
    assert back["numpy"] == 0.5
    assert back["array"] == [0, 1, 2]
    assert back["mapping"] == {"a": 1}
    assert back["enum"] == "red"
    assert back["object"] == "{1, 2}"
    assert back[(1, 2)] == "a tuple as key"


def test_deep_nesting_and_cycles_become_a_note():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested too deeply" in dump_json({"args": deep, "other": 1})
    load_json(dump_json({"args": deep}))
    cycle: dict = {}
    cycle["self"] = cycle
    assert "nested too deeply" in dump_json(cycle)
    level = load_json(dump_json({"keep": "me", "cycle": cycle}))
    assert level["keep"] == "me"


def test_sorted_keys_do_not_depend_on_insertion():
    assert dump_json({"b": 1, "a": float("nan")}, sort_keys=True) == dump_json(
        {"a": float("nan"), "b": 1}, sort_keys=True
    )


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="unknown kind"):
        load_json('{"$stepgym":["alien",1]}')
