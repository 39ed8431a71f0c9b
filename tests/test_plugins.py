from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepgym.errors import UserError
from stepgym.plugins import Registry, import_target, suggestion, unknown


def registry() -> Registry[object]:
    return Registry("shape", {"decoder": "json:JSONDecoder", "gone": "no_such_module_x:Thing", "bad": "json:NoSuch"})


def test_names_are_imported_when_they_are_asked_for() -> None:
    import json

    shapes = registry()
    assert shapes.names() == ["bad", "decoder", "gone"] == list(shapes)
    assert shapes.target("decoder") == "json:JSONDecoder"
    assert shapes.get("decoder") is json.JSONDecoder
    assert "decoder" in shapes
    assert "x" not in shapes
    assert len(shapes) == 3


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(
        UserError, match=r"^unknown shape 'decodr'; did you mean 'decoder'\? Known: bad, decoder, gone$"
    ):
        registry().get("decodr")
    with pytest.raises(UserError, match=r"^unknown shape 'zzz'; known: bad, decoder, gone$"):
        registry().get("zzz")
    with pytest.raises(KeyError):
        registry().target("zzz")
    assert unknown("x", "y", []) == "unknown x 'y'; known: none"
    assert suggestion(5, ["55"]) == "; did you mean '55'?"


def test_what_cannot_be_imported_says_so() -> None:
    with pytest.raises(UserError, match="shape 'gone': there is no module 'no_such_module_x'"):
        registry().get("gone")
    with pytest.raises(UserError, match="shape 'bad': 'json' has no 'NoSuch'"):
        registry().get("bad")
    for target in ("json", ":x", "json:"):
        with pytest.raises(UserError, match="is not of the form 'module:Name'"):
            import_target(target, "it")


def test_a_module_whose_own_import_fails_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_module_x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="importing 'needs_more' failed: No module named 'no_such_module_x'"):
        import_target("needs_more:Thing", "it")


def test_a_target_works_without_registering() -> None:
    import json

    assert registry().get("json:JSONEncoder") is json.JSONEncoder
    assert import_target("json:JSONEncoder.encode", "it") is json.JSONEncoder.encode


def test_registering_as_a_decorator_directly_and_twice() -> None:
    shapes = registry()

    @shapes.register("mine")
    class Mine:
        pass

    assert shapes.get("mine") is Mine
    assert shapes.register("mine", Mine) is Mine
    shapes.register("decoder", "json:JSONDecoder")
    with pytest.raises(UserError, match="shape 'decoder' is already registered as json:JSONDecoder"):
        shapes.register("decoder", Mine)


def test_entry_points_add_names_and_never_replace_ours(tmp_path: Path) -> None:
    info = tmp_path / "shapes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stepgym.shapes]\nencoder = json:JSONEncoder\ndecoder = json:loads\n")
    code = """
from stepgym.plugins import Registry
shapes = Registry("shape", {"decoder": "json:JSONDecoder"}, group="stepgym.shapes")
print(shapes.names(), shapes.target("decoder"), shapes.get("encoder").__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "['decoder', 'encoder'] json:JSONDecoder JSONEncoder\n"
