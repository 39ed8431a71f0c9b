"""Faults in rewards, attempts, groups and rows, planted one at a time in clean runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stepgym.inspect.audit import audit
from stepgym.record.outcome import Outcome
from stepgym.record.schema import SCHEMA


def place(finding: Any) -> tuple[str, str, int | None]:
    return finding.check, finding.trajectory, finding.step


def serious(found: Any) -> list[Any]:
    return [f for f in found.findings if f.severity != "note"]


# ---- rewards --------------------------------------------------------------------------------------------------------


def test_rewards_that_do_not_add_up(guess: Any) -> None:
    found = guess.only(guess.step(2, 1, reward=0.5))
    assert place(found) == ("reward_sum", "train/1/2/0/0", None)


def test_a_reward_outside_the_range(guess: Any) -> None:
    steps = (*guess.clean[2].steps[:2], replace(guess.clean[2].steps[2], reward=3.0))
    found = guess.only(guess.trajectory(2, steps=steps, reward=3.0))
    assert place(found) == ("reward_range", "train/1/2/0/0", None)


def test_a_reward_that_is_no_number(guess: Any) -> None:
    found = guess.only(guess.step(2, 1, reward=float("nan")))
    assert place(found) == ("reward_finite", "train/1/2/0/0", 1)


def test_a_reward_moved_to_another_step(guess: Any) -> None:
    """The sum is right, and only the parts say where it belongs."""
    first, second, third = guess.clean[2].steps
    steps = (replace(first, reward=1.0), second, replace(third, reward=0.0, reward_parts={"won": 1.0}))
    found = guess.only(guess.trajectory(2, steps=steps, reward_parts={"won": 1.0}))
    assert place(found) == ("reward_on_wrong_step", "train/1/2/0/0", 0)


def test_a_reward_that_sits_on_an_earlier_turn_than_all_others(guess: Any) -> None:
    """No part says where it belongs, but this environment rewards last turns."""

    def copies(count: int, steps: Any) -> list[Any]:
        return [
            replace(
                guess.clean[2],
                id=replace(guess.clean[2].id, task_id=f"many-{len(steps)}-{number}"),
                seeds={},
                steps=steps,
                task={"id": str(number)},
            )
            for number in range(count)
        ]

    first, second, third = guess.clean[2].steps
    moved = (replace(first, reward=1.0), second, replace(third, reward=0.0))
    one = replace(guess.clean[2], steps=moved)
    found = [f for f in guess.audit([*copies(60, guess.clean[2].steps), one]).findings if f.step is not None]
    assert [place(f) for f in found] == [("reward_on_wrong_step", "train/1/2/0/0", 0)]
    assert found[0].severity == "warning"


def test_rewards_on_earlier_turns_are_no_fault_where_they_are_usual(guess: Any) -> None:
    first, second, third = guess.clean[2].steps
    moved = (first, replace(second, reward=1.0), replace(third, reward=0.0))
    trajectories = [replace(t, steps=moved, reward=1.0, success=True) for t in guess.clean[:3]]
    found = guess.audit([*trajectories, *guess.clean[3:]]).findings
    assert [f for f in found if f.check == "reward_on_wrong_step"] == []


def test_a_reward_on_a_turn_that_the_environment_never_saw(guess: Any) -> None:
    clean = guess.clean[2]
    found = guess.only(guess.trajectory(2, metrics={**clean.metrics, "turns": 2.0}))
    assert place(found) == ("reward_on_wrong_step", "train/1/2/0/0", 2)
    assert "saw 2 turns" in found.text


def test_a_reward_on_a_turn_that_was_given_up(guess: Any) -> None:
    """An agent sampled a turn twice and went on with the second; the reward of the episode sits on the first."""
    first, second, third = guess.clean[2].steps
    steps = (first, replace(second, reward=1.0), second, replace(third, follows=2, reward=0.0))
    found = guess.only(guess.trajectory(2, steps=steps))
    assert place(found) == ("reward_on_wrong_step", "train/1/2/0/0", 1)
    assert "given up for step 2" in found.text


def test_a_malformed_turn_that_is_rewarded(guess: Any) -> None:
    found = guess.only(guess.step(2, 2, status="malformed"))
    assert place(found) == ("rewarded_malformed", "train/1/2/0/0", 2)
    assert found.severity == "error"


def test_a_rewarded_episode_with_a_malformed_turn(guess: Any) -> None:
    found = guess.only(guess.step(2, 1, status="malformed"))
    assert place(found) == ("rewarded_malformed", "train/1/2/0/0", 1)
    assert found.severity == "warning"


def test_a_malformed_turn_without_reward_is_no_fault(guess: Any) -> None:
    assert serious(guess.audit(guess.step(0, 1, status="malformed"))) == []


# ---- failures and attempts ------------------------------------------------------------------------------------------


def test_a_failure_with_a_reward(guess: Any) -> None:
    found = guess.only(guess.trajectory(0, outcome=Outcome.ENGINE_ERROR, success=None))
    assert place(found) == ("failure_in_baseline", "train/1/1/0/0", None)
    assert "engine_error" in found.text


def test_two_final_attempts(guess: Any) -> None:
    again = replace(
        guess.clean[4], id=replace(guess.clean[4].id, attempt=1), seeds={"env": guess.clean[4].seeds["env"]}
    )
    found = guess.only([*guess.clean, again])
    assert place(found) == ("failure_in_baseline", "train/1/3/0/1", None)
    assert "counts twice" in found.text


def test_an_attempt_that_stands_although_it_was_repeated(guess: Any) -> None:
    again = replace(
        guess.clean[4],
        id=replace(guess.clean[4].id, attempt=1),
        final=False,
        seeds={"env": guess.clean[4].seeds["env"]},
    )
    found = guess.only([*guess.clean, again])
    assert place(found) == ("failure_in_baseline", "train/1/3/0/0", None)


def test_an_update_that_counted_a_failure(guess: Any) -> None:
    trajectories = guess.trajectory(0, outcome=Outcome.ENV_ERROR, reward=None, success=None)
    guess.store(trajectories)
    (guess.folder / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "members": 6}) + "\n")
    (found,) = serious(audit(guess.folder))
    assert found.check == "failure_in_baseline"
    assert "counted 6 episodes, but only 5 of the 6" in found.text


def test_an_update_that_counted_none_is_clean(guess: Any) -> None:
    guess.store(guess.trajectory(0, outcome=Outcome.ENV_ERROR, reward=None, success=None))
    (guess.folder / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "members": 5}) + "\n")
    assert serious(audit(guess.folder)) == []


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_two_samples_with_one_seed(guess: Any) -> None:
    found = guess.only(guess.trajectory(3, seeds=guess.clean[2].seeds))
    assert place(found) == ("duplicate_trajectory", "train/1/2/1/0", None)
    assert "train/1/2/0/0" in found.text


def test_a_sample_that_is_missing(guess: Any) -> None:
    found = guess.only(guess.clean[:3] + guess.clean[4:])
    assert place(found) == ("missing_samples", "train/1/2", None)
    assert "samples 1 of 2 are missing" in found.text


def test_a_sample_without_a_final_attempt(guess: Any) -> None:
    found = guess.only(guess.trajectory(3, final=False))
    assert place(found) == ("missing_samples", "train/1/2", None)
    assert "no final attempt" in found.text


def test_a_sample_of_another_task(guess: Any) -> None:
    found = guess.only(guess.trajectory(3, task={**guess.clean[3].task, "answer": 99}))
    assert place(found) == ("group_differs", "train/1/2/1/0", None)


def test_groups_without_variance_are_named_and_counted(guess: Any) -> None:
    found = guess.audit(guess.clean)
    assert found.statistics["zero_variance_groups"] == 3
    assert {f.check for f in found.findings} == {"zero_variance"}
    assert {f.severity for f in found.findings} == {"note"}
    assert [f.trajectory for f in found.findings] == ["train/1/1", "train/1/2", "train/1/3", ""]
    assert "3 of 3" in found.findings[-1].text


def test_a_group_with_variance_is_no_finding(guess: Any) -> None:
    steps = (*guess.clean[2].steps[:2], replace(guess.clean[2].steps[2], reward=0.5))
    found = guess.audit(guess.trajectory(2, steps=steps, reward=0.5))
    assert "train/1/2" not in {f.trajectory for f in found.findings}
    assert found.statistics["zero_variance_share"] == 2 / 3


# ---- rows -----------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Any) -> None:
    """Change the rows of the only shard, as a writer of one's own might have written them."""
    (shard,) = (folder / "trajectories").glob("*.parquet")
    rows = pq.read_table(shard, partitioning=None).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), shard)


def test_a_loss_mask_that_is_too_short(guess: Any) -> None:
    guess.store(guess.clean)
    rewrite(guess.folder, lambda rows: rows[2]["steps"][1]["loss_mask"].pop())
    found = audit(guess.folder)
    (finding,) = serious(found)
    assert place(finding) == ("token_lengths", "train/1/2/0/0", 1)
    assert "loss_mask has 19 entries for 20 response tokens" in finding.text
    assert found.trajectories == 5


def test_logprobs_that_are_too_many(guess: Any) -> None:
    guess.store(guess.clean)
    rewrite(guess.folder, lambda rows: rows[5]["steps"][0]["logprobs"].append(-1.0))
    (finding,) = serious(audit(guess.folder))
    assert place(finding) == ("token_lengths", "train/1/3/1/0", 0)


def test_a_delta_that_fits_nothing(guess: Any) -> None:
    guess.store(guess.clean)
    rewrite(guess.folder, lambda rows: rows[1]["steps"][1].update(keep=9999))
    (finding,) = serious(audit(guess.folder))
    assert place(finding) == ("unreadable_record", "train/1/1/1/0", None)
    assert "step 1" in finding.text


def test_a_trajectory_stored_twice(guess: Any) -> None:
    guess.store(guess.clean)
    rewrite(guess.folder, lambda rows: rows.append(rows[3]))
    (finding,) = serious(audit(guess.folder))
    assert place(finding) == ("duplicate_trajectory", "train/1/2/1/0", None)
