"""What is waited for shows beside the bar on a terminal, and as a line now and then where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stepgym.cli import progress
from stepgym.cli.progress import ProgressDisplay


@pytest.mark.parametrize(("seconds", "lines"), [(-1.0, 2), (1e9, 0)])
def test_without_a_terminal_it_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lines: int
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", seconds)
    text = io.StringIO()
    with ProgressDisplay(Console(file=text, width=80)) as display:
        display.doing("nothing yet")
        display.stage("vllm", None)
        display.doing("starting vLLM (3 s): [loading] weights")
    assert len(text.getvalue().splitlines()) == lines
    assert ("vllm: starting vLLM (3 s): [loading] weights" in text.getvalue()) is (lines > 0)


def test_on_a_terminal_it_stands_beside_the_bar() -> None:
    text = io.StringIO()
    with ProgressDisplay(Console(file=text, force_terminal=True, width=120)) as display:
        display.doing("nothing yet")  # no bar to stand beside
        display.stage("vllm", None)
        display.doing("starting vLLM [/odd] [bold]")
        display._progress.refresh()
    assert "starting vLLM [/odd] [bold]" in text.getvalue()
    assert "nothing yet" not in text.getvalue()
