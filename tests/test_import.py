from __future__ import annotations

import subprocess
import sys

import pytest

import stepgym


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_stepgym_imports_nothing_heavy() -> None:
    code = """
import sys
import stepgym
heavy = {"torch", "transformers", "vllm", "datasets", "pyarrow", "openai", "pydantic", "stepgym_sql"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_environments_are_registered_with_gymnasium_as_strings_on_import() -> None:
    code = """
import stepgym, gymnasium, sys
spec = gymnasium.spec("stepgym/sql-v0")
print(type(spec.entry_point).__name__, spec.order_enforce, spec.disable_env_checker, "stepgym_sql" in sys.modules)
"""
    assert python(code) == "str False True False"


@pytest.mark.parametrize("name", stepgym.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    value = getattr(stepgym, name)
    assert value is getattr(stepgym, name)
    assert name in dir(stepgym)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'stepgym' has no attribute 'nonsense'"):
        _ = stepgym.nonsense  # type: ignore[attr-defined]
