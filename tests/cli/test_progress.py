"""What is waited for shows beside the bar on a terminal, and as a line now and then where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stepgym.cli import progress
from stepgym.cli.progress import ProgressDisplay, iteration_line, short_count


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


ROW = {
    "iteration": 12,
    "reward_mean": 0.457,
    "success": 0.5,
    "validation_success": None,
    "turns_mean": 4.13,
    "response_tokens_mean": 29.4,
    "entropy": float("nan"),
    "logprob_gap_mean": 1.1e-7,
    "grad_norm": 0.321,
    "tokens_forward": 25_110,
    "tokens_steps": 57_529,
    "seconds/rollout": 0.93,
    "seconds/update": 1.5,
    "seconds/sync": 0.01,
    "iteration_s": 2.52,
}


def test_an_iteration_is_a_line() -> None:
    assert iteration_line(12, ROW) == (
        "iteration   12  reward +0.46  success 0.50  turns 4.1  response 29  gap 1.1e-07  gradient 0.32  "
        "25.1k of 57.5k tokens  2.5 s (rollout 0.9, update 1.5)"
    )
    assert iteration_line(3, {"iteration": 3, "success": 0.5}) == "iteration    3  success 0.50"


def test_an_iteration_and_an_alarm_are_lines_above_the_bar() -> None:
    text = io.StringIO()
    with ProgressDisplay(Console(file=text, width=80)) as display:
        display.iteration(12, ROW)
        display.alarm("no_signal", "no_signal: [100%] of groups have equal rewards.")
    first, second = text.getvalue().splitlines()
    assert first == iteration_line(12, ROW)
    assert second == "alarm: no_signal: [100%] of groups have equal rewards."


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1000, "1.0k"), (2.5e6, "2.5M"), (3e9, "3.0G")])
def test_counts_are_short(number: float, text: str) -> None:
    assert short_count(number) == text
