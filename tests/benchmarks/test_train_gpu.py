"""The benchmark for GPUs, in its form for the CPU: all ways compute the same gradient, and the report is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "train_gpu.py"


@pytest.mark.slow
def test_the_small_form_agrees_with_plain_transformers(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARK), "--small", "--repeats", "1", "--scale", "0.02", "--workloads", "b", "d"]
    command += ["--budget", "500", "--peak", "1e9", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["missed"] == []
    for ways in found["models"]["tiny"].values():
        assert set(ways) == {"plain", "merged", "tree"}
        assert ways["tree"]["unique_tokens"] <= ways["tree"]["tokens"] <= ways["merged"]["tokens"]
        assert ways["merged"]["tokens"] <= ways["plain"]["tokens"]
        for way in ways.values():
            assert way["gradient_norm"] == pytest.approx(ways["tree"]["gradient_norm"], rel=1e-4)
            assert way["loss"] == pytest.approx(ways["tree"]["loss"], abs=1e-6)
            used = way["operations"] / way["seconds"]["median"] / 1e9
            assert way["utilisation"] == pytest.approx(used)
            assert way["operations"] == ways["tree"]["operations"]  # the same work, whatever is computed
