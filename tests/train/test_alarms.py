"""Alarms fire on what precedes a collapse, once, and stay silent in runs that are only noisy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepgym.train.alarm_rules import RULES
from stepgym.train.alarms import Alarm, AlarmConfig, Alarms

RECORDED = Path(__file__).parent / "data" / "healthy_runs.json"

HEALTHY: dict[str, float] = {
    "parse_failure_rate": 0.03,
    "no_action_rate": 0.04,
    "tool_call_rate": 0.8,
    "turns_mean": 4.0,
    "response_tokens_mean": 200.0,
    "truncated_rate": 0.04,
    "sampler_entropy": 0.4,
    "logprob_gap_mean": 0.01,
    "success": 0.5,
    "grad_norm": 0.4,
    "kl": 0.02,
    "clip_fraction_low": 0.02,
    "clip_fraction_high": 0.03,
    "failed_rate": 0.01,
}
COUNTS = {"groups": 16, "zero_variance_groups": 6, "members": 120, "masked": 8, "updates": 1, "nonfinite_updates": 0}


def rows(count: int, seed: int = 0, noise: float = 0.1) -> list[dict[str, Any]]:
    """A run whose numbers only wobble: each by so much of itself (one standard deviation)."""
    rng = np.random.default_rng(seed)
    return [
        {
            "iteration": iteration,
            **COUNTS,
            **{name: float(value * np.exp(noise * rng.normal())) for name, value in HEALTHY.items()},
        }
        for iteration in range(1, count + 1)
    ]


def watch(run: list[dict[str, Any]], config: AlarmConfig | None = None) -> list[Alarm]:
    alarms = Alarms(config)
    for row in run:
        alarms.look(row["iteration"], row)
    return alarms.raised


def changed(run: list[dict[str, Any]], start: int, change: Mapping[str, float]) -> list[dict[str, Any]]:
    """The run with these numbers from an iteration on."""
    return [{**row, **change} if row["iteration"] >= start else row for row in run]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0.0, 0.2))
def test_noise_alone_raises_nothing(seed: int, noise: float) -> None:
    assert watch(rows(60, seed, noise)) == []


@pytest.mark.parametrize("run", json.loads(RECORDED.read_text()), ids=lambda run: run["name"])
def test_recorded_runs_that_learned_raise_nothing(run: dict[str, Any]) -> None:
    assert len(run["rows"]) >= 10
    assert run["rows"][-1]["success"] > run["rows"][0]["success"] + 0.2
    assert watch(run["rows"]) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("parse_failures", {"parse_failure_rate": 0.25}),
        ("no_actions", {"no_action_rate": 0.3}),
        ("tools_unused", {"tool_call_rate": 0.1}),
        ("turns_fall", {"turns_mean": 1.5}),
        ("responses_grow", {"response_tokens_mean": 500.0}),
        ("responses_shrink", {"response_tokens_mean": 40.0}),
        ("responses_cut_off", {"truncated_rate": 0.3}),
        ("entropy_collapse", {"sampler_entropy": 0.02}),
        ("entropy_explosion", {"sampler_entropy": 2.5}),
        ("logprob_gap", {"logprob_gap_mean": 0.08}),
        ("no_signal", {"zero_variance_groups": 16}),
        ("reward_falls", {"success": 0.05}),
        ("gradient_spike", {"grad_norm": 30.0}),
        ("gradient_not_finite", {"nonfinite_updates": 1}),
        ("kl_runs_away", {"kl": 0.3}),
        ("clipping", {"clip_fraction_high": 0.5}),
        ("episodes_lost", {"failed_rate": 0.15}),
        ("episodes_masked", {"members": 50, "masked": 78}),
        ("episodes_stale", {"stale_dropped": 40}),
    ],
)
def test_each_alarm_is_raised_once_and_soon(name: str, change: dict[str, float]) -> None:
    raised = watch(changed(rows(40), 20, change))
    assert [alarm.name for alarm in raised] == [name]
    assert 20 <= raised[0].iteration <= 22
    assert raised[0].text.startswith(f"{name}: ")
    assert "\n" not in raised[0].text
    assert len(raised[0].text) <= 270


def test_every_rule_has_a_case_above() -> None:
    cases = next(mark for mark in test_each_alarm_is_raised_once_and_soon.pytestmark).args[1]  # type: ignore[attr-defined]
    assert {case[0] for case in cases} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logprob_gap", {"logprob_gap_mean": 0.2}),
        ("responses_cut_off", {"truncated_rate": 0.7}),
        ("parse_failures", {"parse_failure_rate": 0.6}),
        ("no_signal", {"zero_variance_groups": 16}),
    ],
)
def test_what_is_wrong_from_the_start_is_told_before_there_is_a_baseline(name: str, change: dict[str, float]) -> None:
    raised = watch(changed(rows(20), 1, change))
    assert [alarm.name for alarm in raised] == [name]
    assert raised[0].iteration <= 3
    assert raised[0].before is None


def test_one_odd_iteration_is_no_event() -> None:
    run = rows(30)
    run[19] = {**run[19], "parse_failure_rate": 0.9, "success": 0.0, "sampler_entropy": 3.0}
    assert watch(run) == []


def test_it_says_the_number_now_and_before() -> None:
    (alarm,) = watch(changed(rows(30, noise=0.0), 20, {"parse_failure_rate": 0.25}))
    assert (alarm.iteration, alarm.value, alarm.before) == (21, 0.25, pytest.approx(0.03))
    assert alarm.text.startswith("parse_failures: 25% of turns do not parse; before 3% (median of 10 iterations). ")
    assert Alarm(**alarm.to_dict()) == alarm


def test_a_second_event_is_told_again_and_a_flickering_one_is_not() -> None:
    high, low = {"parse_failure_rate": 0.3}, {"parse_failure_rate": 0.03}
    twice = changed(changed(changed(rows(50), 15, high), 18, low), 30, high)
    assert [alarm.iteration for alarm in watch(twice)] == [16, 31]
    flicker = [{**row, **(high if row["iteration"] % 3 else low)} if row["iteration"] > 14 else row for row in rows(30)]
    assert [alarm.iteration for alarm in watch(flicker)] == [17]


def test_what_stays_becomes_the_baseline() -> None:
    moved = changed(changed(rows(90), 15, {"response_tokens_mean": 500.0}), 60, {"response_tokens_mean": 1200.0})
    assert [(alarm.name, alarm.iteration) for alarm in watch(moved)] == [("responses_grow", 16), ("responses_grow", 61)]


def test_an_agent_that_has_solved_its_tasks_may_be_sure_of_itself() -> None:
    sure = {"sampler_entropy": 0.01}
    assert watch(changed(rows(30), 15, {**sure, "success": 0.97})) == []
    assert [alarm.name for alarm in watch(changed(rows(30), 15, sure))] == ["entropy_collapse"]


def test_entropy_that_sinks_slowly_is_seen_against_the_start() -> None:
    run = [{**row, "sampler_entropy": 0.4 * 0.9 ** row["iteration"]} for row in rows(60)]
    (alarm,) = watch(run)
    assert (alarm.name, alarm.before) == ("entropy_collapse", pytest.approx(0.4 * 0.9**3))
    assert "at the start" in alarm.text


def test_iterations_without_the_number_do_not_count() -> None:
    run = [
        {key: value for key, value in row.items() if row["iteration"] % 2 or key != "kl"}
        for row in changed(rows(40), 20, {"kl": 0.6, "grad_norm": float("nan"), "entropy": None})  # type: ignore[dict-item]
    ]
    assert [(alarm.name, alarm.iteration) for alarm in watch(run)] == [("kl_runs_away", 23)]


def test_alarms_can_be_turned_off_and_levels_set() -> None:
    moved = changed(rows(40), 20, {"parse_failure_rate": 0.25, "logprob_gap_mean": 0.15})
    assert [alarm.name for alarm in watch(moved)] == ["parse_failures", "logprob_gap"]
    assert [alarm.name for alarm in watch(moved, AlarmConfig(off=("parse_failures",)))] == ["logprob_gap"]
    steady = changed(rows(20, noise=0.0), 1, {"logprob_gap_mean": 0.15})
    assert [alarm.name for alarm in watch(steady)] == ["logprob_gap"]
    assert watch(steady, AlarmConfig(levels={"logprob_gap": 0.2})) == []
    assert watch(steady, AlarmConfig(levels={"logprob_gap": None})) == []
    assert [alarm.name for alarm in watch(rows(9), AlarmConfig(levels={"turns_fall": 5.0}))] == ["turns_fall"]


def test_the_bounds_can_be_widened() -> None:
    moved = changed(rows(40, noise=0.2), 20, {"response_tokens_mean": 500.0})
    assert [alarm.name for alarm in watch(moved)] == ["responses_grow"]
    assert watch(moved, AlarmConfig(deviations=40.0)) == []


@pytest.mark.parametrize("wrong", [{"off": ["entropy_colapse"]}, {"levels": {"entropy_colapse": 0.1}}])
def test_an_unknown_alarm_is_refused_with_a_suggestion(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="did you mean 'entropy_collapse'"):
        AlarmConfig.model_validate(wrong)


def test_a_resumed_run_goes_on_as_if_it_had_not_been_interrupted() -> None:
    run = changed(rows(40), 18, {"parse_failure_rate": 0.3, "turns_mean": 1.0})
    for cut in (5, 17, 18, 19, 25):
        alarms = Alarms()
        alarms.replay([{"iteration": 0, "warm_start": {}}, *run[:cut]])
        for row in run[cut:]:
            alarms.look(row["iteration"], row)
        assert alarms.raised == watch(run)


def test_a_number_that_hovers_below_its_level_is_not_back_yet() -> None:
    lost = [0.12, 0.12, 0.09, 0.09, 0.09, 0.12, 0.12, 0.0, 0.0, 0.0, 0.12, 0.12]
    run = [{"iteration": number, "failed_rate": rate} for number, rate in enumerate(lost, start=1)]
    assert [alarm.iteration for alarm in watch(run)] == [2, 12]
