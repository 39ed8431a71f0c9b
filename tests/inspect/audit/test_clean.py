"""A clean run has no findings: the audit cries no wolf."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("game", ["colours", "guess", "dated"])
def test_a_clean_run_has_no_findings(game: str, request: pytest.FixtureRequest) -> None:
    bench: Any = request.getfixturevalue(game)
    found = bench.audit(bench.clean)
    assert [f for f in found.findings if f.severity != "note"] == []
    assert {c.check for c in found.checks if c.status == "skipped"} == {"logprob_gap"}
    assert found.trajectories == 6
    assert found.steps == sum(len(t.steps) for t in bench.clean)
