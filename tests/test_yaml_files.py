from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.yaml_files import apply_overrides, load_yaml, parse_yaml


def test_yaml_is_1_2() -> None:
    text = "rate: 1e-6\nno_: no\non_: on\noctal: 010\nday: 2024-01-01\ntime: 1:30\nflag: true\nempty:\n"
    assert parse_yaml(text, "x") == {
        "rate": 1e-6,
        "no_": "no",
        "on_": "on",
        "octal": 10,
        "day": "2024-01-01",
        "time": "1:30",
        "flag": True,
        "empty": None,
    }


def test_anchors_and_merges_work() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: *x", "x") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": 2},
        "e": {"b": 1},
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 'f.yaml:3: duplicate key "a"'),
        ("a: [1\nb: 2\n", "f.yaml:2: expected ',' or ']', but got ':'"),
        ("a: b: c", "f.yaml:1: mapping values are not allowed here"),
        ("\ta: 1", "f.yaml:1: "),
        ("a: *x", "f.yaml:1: found undefined alias 'x'"),
        ("a: !foo 1", "f.yaml:1: could not determine a constructor for the tag '!foo'"),
        ("a: !!python/object:os.system x", "f.yaml:1: could not determine a constructor"),
        ("a: !!binary aGk=", "f.yaml:1: could not determine a constructor"),
        ("!!set {a}", "f.yaml:1: could not determine a constructor"),
        ("a: 1\n---\nb: 2", "f.yaml:2: "),
        ("1: 2", "f.yaml: the key 1 must be text; put it in quotes"),
        ("&a [*a]", "f.yaml: an alias refers to the value that contains it"),
        ("a: \x00", "f.yaml: is not YAML: "),
        ("[" * 1000, "f.yaml: is not YAML: "),
        ("- 1", "f.yaml: expected a mapping of fields at the top level, got list"),
        ("just text", "f.yaml: expected a mapping of fields at the top level, got str"),
    ],
)
def test_bad_files_are_one_line_with_file_and_line(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_yaml("f.yaml")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder, not a YAML file"):
        load_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(UserError, match=r"is not UTF-8 text \(byte 3\)"):
        load_yaml(tmp_path / "latin.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_yaml(tmp_path / "empty.yaml") == {}


CONFIG: dict[str, Any] = {"engine": {"kind": "transformers", "seed": 1}, "list": [1, {"a": 2}], "seed": 0, "none": None}


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["seed=7"], {"seed": 7}),
        (["seed=7", "seed=8"], {"seed": 8}),
        (["rate=1e-6"], {"rate": 1e-6}),
        (["name=no"], {"name": "no"}),
        (["name='7'"], {"name": "7"}),
        (["name="], {"name": None}),
        (["url=http://host:80/v1?a=b"], {"url": "http://host:80/v1?a=b"}),
        (["note=a: b"], {"note": "a: b"}),
        (["map={a: 1}"], {"map": {"a": 1}}),
        (["numbers=[1, 2]"], {"numbers": [1, 2]}),
        (["new.deep.field=1"], {"new": {"deep": {"field": 1}}}),
        (["none.field=1"], {"none": {"field": 1}}),
        (["list.0=5"], {"list": [5, {"a": 2}]}),
        (["list.1.a=5"], {"list": [1, {"a": 5}]}),
        (["engine.seed=3"], {"engine": {"kind": "transformers", "seed": 3}}),
        (["engine=vllm"], {"engine": {"kind": "vllm"}}),
        (["engine=vllm", "engine.port=1"], {"engine": {"kind": "vllm", "port": 1}}),
        (["engine.port=1", "engine=vllm"], {"engine": {"kind": "vllm"}}),
        (["engine={kind: openai, port: 2}"], {"engine": {"kind": "openai", "port": 2}}),
        (["agent=chat"], {"agent": {"kind": "chat"}}),
    ],
)
def test_overrides(overrides: list[str], changes: dict[str, Any]) -> None:
    before = repr(CONFIG)
    assert apply_overrides(CONFIG, overrides, sections={"agent"}) == {**CONFIG, **changes}
    assert repr(CONFIG) == before


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed", "expected name=value"),
        ("=5", "expected name=value"),
        ("a..b=5", "expected name=value"),
        ("seed.x=5", "'seed' is 0, not a section"),
        ("engine.kind.x=5", "'engine.kind' is 'transformers', not a section"),
        ("list.7=5", "'7' is not an index into a list of 2"),
        ("list.x=5", "'x' is not an index into a list of 2"),
        ("a=[1", "override 'a=[1'"),
    ],
)
def test_bad_overrides_are_one_line(override: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides(CONFIG, [override])
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(), st.text())
def test_any_text_is_read_or_refused_in_one_line(path: str, value: str) -> None:
    for parse in (lambda: parse_yaml(value, "x"), lambda: apply_overrides(CONFIG, [f"{path}={value}"])):
        line = "fine"
        try:
            parse()
        except UserError as error:
            line = str(error)
        assert len(line.splitlines()) == 1
