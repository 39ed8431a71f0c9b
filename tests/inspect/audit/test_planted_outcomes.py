"""Faults of outcomes and of groups, planted in clean episodes: each is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepgym.record.outcome import Outcome


def serious(audit: Any) -> list[tuple[str, str, str]]:
    return [(f.check, f.severity, f.trajectory) for f in audit.findings if f.severity != "note"]


@pytest.mark.parametrize("outcome", [Outcome.RESPONSE_TRUNCATED, Outcome.MALFORMED_ACTION])
def test_an_outcome_that_no_turn_bears_out(guess: Any, outcome: Outcome) -> None:
    found = guess.only(guess.trajectory(3, outcome=outcome))
    assert (found.check, found.severity, found.trajectory) == ("outcome", "warning", "train/1/2/1/0")


def test_a_scored_episode_without_a_reward(guess: Any) -> None:
    found = guess.audit(guess.trajectory(3, reward=None, success=None))
    assert ("outcome", "error", "train/1/2/1/0") in serious(found)


def test_an_episode_without_turns_counted_as_zero(guess: Any) -> None:
    """A rollout that failed, trained as reward 0."""
    found = guess.only(guess.trajectory(3, steps=(), reward=0.0, reward_parts={}))
    assert (found.check, found.severity, found.trajectory) == ("outcome", "warning", "train/1/2/1/0")


def test_an_episode_that_ran_out_of_time_before_it_began_is_no_fault(guess: Any) -> None:
    late = guess.trajectory(3, steps=(), reward=None, success=None, reward_parts={}, outcome=Outcome.EPISODE_TIMEOUT)
    assert serious(guess.audit(late)) == []


@pytest.mark.parametrize(("failed", "severity"), [(1, "note"), (2, "warning")])
def test_samples_that_failed_are_counted(guess: Any, failed: int, severity: str) -> None:
    lost = [
        replace(t, outcome=Outcome.ENGINE_ERROR, reward=None, success=None, reward_parts={}, steps=())
        for t in guess.clean[:failed]
    ]
    audit = guess.audit([*lost, *guess.clean[failed:]])
    found = [f for f in audit.findings if f.check == "outcome"]
    assert [(f.severity, f.trajectory) for f in found] == [(severity, "")]
    assert f"{failed} of 6 samples failed" in found[0].text
    assert f"engine_error {failed}" in found[0].text


def test_samples_that_say_the_same_against_all_odds(guess: Any) -> None:
    """All samples of the game say the same; it is a fault only where their logprobs make that impossible."""
    unlikely = [replace(t, steps=tuple(replace(s, logprobs=s.logprobs - 2.0) for s in t.steps)) for t in guess.clean]
    found = guess.audit(unlikely)
    assert set(serious(found)) == {("duplicate_trajectory", "error", f"train/1/{task}/1/0") for task in (1, 2, 3)}
    assert "e^-" in found.findings[0].text


def test_greedy_samples_that_say_the_same_are_no_fault(guess: Any) -> None:
    greedy = [
        replace(
            t,
            id=replace(t.id, phase="test"),
            steps=tuple(
                replace(s, logprobs=s.logprobs - 2.0, sampling=replace(s.sampling, temperature=0.0)) for s in t.steps
            ),
        )
        for t in guess.clean
    ]
    assert serious(guess.audit(greedy)) == []


def test_the_conversation_of_another_task(colours: Any) -> None:
    """Its task and its seed are its group's, but it was told something else."""
    message = {"role": "user", "content": "Close the door."}
    step = colours.clean[5].steps[0]
    steps = (replace(step, prompt_ids=colours.renderer.prompt([message]).new_ids, new_messages=(message,)),)
    found = colours.audit(colours.trajectory(5, steps=steps, reward=0.0))
    assert [entry for entry in serious(found) if entry[0] == "group_differs"] in (
        [("group_differs", "warning", "train/1/train-2/1/0")],
        [("group_differs", "warning", "train/1/train-2/0/0")],
    )


def test_one_conversation_in_a_row_for_each_turn(guess: Any) -> None:
    """Turns taken for trajectories: each in a row of its own, as a sample of its own."""
    rows = [
        replace(t, id=replace(t.id, sample=3 * t.id.sample + n), steps=(replace(s, follows=None),), reward=s.reward)
        for t in guess.clean
        for n, s in enumerate(t.steps)
    ]
    found = {check for check, severity, _ in serious(guess.audit(rows)) if severity == "error"}
    assert found >= {"duplicate_trajectory", "follows", "prompt_drift"}


def test_an_observation_sampled_into_a_response_without_a_stop_string(guess: Any) -> None:
    """The turn's end and the tool's answer within the response, and the next prompt begins after it."""
    first, second = guess.clean[0].steps[:2]
    more = second.prompt_ids[first.length :]
    ids = np.concatenate([first.response_ids, more])
    changed = replace(
        first,
        response_ids=ids,
        loss_mask=None,
        logprobs=np.linspace(-0.5, -0.1, len(ids)),
        weights_versions=(("3", 0, len(ids)),),
    )
    audit = guess.audit(guess.trajectory(0, steps=(changed, *guess.clean[0].steps[1:])))
    found = [f for f in audit.findings if f.check == "observation_in_response"]
    assert [(f.trajectory, f.step, f.token) for f in found] == [("train/1/1/0/0", 0, first.length)]
    assert "the observation of step 1" in found[0].text


def test_rollouts_of_one_iteration_used_again_in_the_next(guess: Any) -> None:
    again = [replace(t, id=replace(t.id, iteration=2)) for t in guess.clean]
    found = serious(guess.audit([*guess.clean, *again]))
    assert found == [
        ("duplicate_trajectory", "error", f"train/2/{task}/{sample}/0") for task in (1, 2, 3) for sample in (0, 1)
    ]


def test_tools_that_the_model_was_never_shown(guess: Any) -> None:
    step = guess.clean[0].steps[0]
    prompt = guess.renderer.prompt(step.new_messages).new_ids
    first = replace(step, prompt_ids=prompt)
    found = guess.audit(guess.trajectory(0, steps=(first,), reward=0.0))
    drift = [f for f in found.findings if f.check == "prompt_drift"]
    assert [(f.severity, f.trajectory, f.step) for f in drift] == [("error", "train/1/1/0/0", 0)]
    assert "none of the tools" in drift[0].text


def test_a_reward_for_words_that_no_turn_said_is_a_warning(guess: Any) -> None:
    """An agent may act with words of its own; then no step can hold the reward."""
    trajectory = guess.clean[0]
    last = trajectory.steps[-1]
    said = {name: value for name, value in last.metrics.items() if name != "env_turn"}
    steps = (*trajectory.steps[:-1], replace(last, metrics=said))
    found = guess.only(
        guess.trajectory(0, steps=steps, reward=trajectory.reward + 1.0 if not trajectory.reward else 0.0)
    )
    assert (found.check, found.severity) == ("reward_sum", "warning")
    assert "words of its own" in found.text
