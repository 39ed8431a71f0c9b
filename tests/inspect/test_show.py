"""What `show` looks up: a trajectory by its name, its group, its advantages, the texts of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.inspect.advantage import DEFAULT_CREDIT
from stepgym.inspect.plain_text import plain, shortened
from stepgym.inspect.recorded_run import RecordedRun
from stepgym.inspect.show import show
from stepgym.inspect.token_text import TokenTexts, find_token_texts
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId

REWARDS = (1.0, 0.0, 0.0, 1.0)


def made(
    task: str, sample: int, reward: float | None, *, attempt: int = 0, phase: str = "train", **fields: Any
) -> Trajectory:
    steps = [
        Step(prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-0.5, -np.inf]),
        Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], logprobs=[-0.1], reward=reward or 0.0, follows=0),
    ]
    fields.setdefault("outcome", Outcome.COMPLETED if reward is not None else Outcome.ENV_ERROR)
    return Trajectory(id=TrajectoryId(phase, 0, task, sample, attempt), steps=steps, reward=reward, **fields)


def run_of(folder: Path, trajectories: Sequence[Trajectory], config: str = "algorithm: {}\n") -> Path:
    with TrajectoryStore(folder / "trajectories", "a") as store:
        for trajectory in trajectories:
            store.append(trajectory)
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tasks of four samples; the second sample of the first failed once and was repeated."""
    group = [made("t/1", i, reward) for i, reward in enumerate(REWARDS) if i != 1]
    group += [made("t/1", 1, None, final=False), made("t/1", 1, 0.0, attempt=1)]
    return run_of(tmp_path / "run", [*group, *(made("t/17", i, 0.25 * i) for i in range(4))])


# ---- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("train/0/t/1/2/0", "train/0/t/1/2/0"),
        ("train/0/t/1/2", "train/0/t/1/2/0"),
        ("train/0/t/1/1/1", "train/0/t/1/1/1"),
        ("train/0/t/17/3/", "train/0/t/17/3/0"),
    ],
)
def test_an_id_or_how_it_begins(run: Path, name: str, found: str) -> None:
    assert str(show(run, name).trajectory.id) == found
    assert str(show(run / "trajectories", name).trajectory.id) == found


def test_whole_parts_come_first(run: Path) -> None:
    with pytest.raises(UserError, match=r"^'train/0/t/1' fits 5 trajectories: train/0/t/1/0/0, train/0/t/1/1/0, "):
        show(run, "train/0/t/1")
    with pytest.raises(UserError, match=r"fits 9 trajectories: .* and 3 more$"):
        show(run, "tr")
    with pytest.raises(UserError, match=r"fits 2 trajectories: train/0/t/1/1/0, train/0/t/1/1/1$"):
        show(run, "train/0/t/1/1")


def test_first_worst_and_best(run: Path) -> None:
    assert str(show(run, pick="first").trajectory.id) == "train/0/t/1/0/0"
    assert str(show(run, pick="best").trajectory.id) == "train/0/t/1/0/0"
    assert str(show(run, pick="worst").trajectory.id) == "train/0/t/1/1/1"  # the attempt before it is not final
    assert str(show(run, "train/0/t/17", pick="best").trajectory.id) == "train/0/t/17/3/0"
    with pytest.raises(UserError, match="none of these 1 trajectories has a reward"):
        show(run, "train/0/t/1/1/0", pick="best")


def test_what_is_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"which trajectory. Give an id such as train/0/t/1/0/0"):
        show(run)
    with pytest.raises(UserError, match=r"no trajectory's id begins with 'train/1'; the first is train/0/t/1/0/0"):
        show(run, "train/1")
    with pytest.raises(UserError, match="no trajectories yet"):
        show(run_of(tmp_path / "empty", []), pick="first")


# ---- advantages -----------------------------------------------------------------------------------------------------


def test_the_advantage_is_what_training_gave(run: Path) -> None:
    shown = show(run, "train/0/t/1/0/0")
    expected = 0.5 / (np.std(REWARDS, ddof=1) + 1e-6)
    assert shown.advantages == pytest.approx([expected] * 2)
    assert shown.advantage_note == "grpo, 4 of the group count"
    assert [(s.sample, s.attempt, s.final, s.reward) for s in shown.group] == [
        (0, 0, True, 1.0), (1, 0, False, None), (1, 1, True, 0.0), (2, 0, True, 0.0), (3, 0, True, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("algorithm: {credit: rloo}", [2 / 3] * 2),
        ("algorithm: {credit: {kind: grpo, scale_by_std: false}}", [0.5] * 2),
        ("algorithm: {credit: maxrl}", [0.5 / (0.5 + 1e-6)] * 2),
        # The first turn is worth half of what the second gives; the baseline is the mean of (0.75, 0, 0, 0.75).
        ("algorithm: {credit: {kind: turn_returns, gamma: 0.5, scale_by_std: false}}", [0.125, 0.625]),
    ],
)
def test_the_credit_and_its_options_are_the_configs(tmp_path: Path, config: str, expected: list[float]) -> None:
    run = run_of(tmp_path, [made("t", i, reward) for i, reward in enumerate(REWARDS)], config)
    assert show(run, "train/0/t/0").advantages == pytest.approx(expected)


def test_a_credit_over_the_batch_sees_every_group_of_the_iteration(tmp_path: Path) -> None:
    # The iteration's rewards: 1, 0, 0, 1 and 4: mean 1.2, squares 0.04 + 1.44 + 1.44 + 0.04 + 7.84, over 4: 2.7.
    made_of = [made("t", i, reward) for i, reward in enumerate(REWARDS)] + [made("other", 0, 4.0)]
    later = [replace(made("t", i, 9.0), id=TrajectoryId("train", 1, "t", i)) for i in range(2)]
    failed = [made("other", 1, None), made("t", 9, 8.0, phase="validation")]
    config = "algorithm: {credit: reinforce_plus_plus}\nrefill: {rounds: 0}\noverlap: {kind: none}\n"
    run = run_of(tmp_path, [*made_of, *later, *failed], config)
    shown = show(run, "train/0/t/0")
    assert shown.advantages == pytest.approx([-0.2 / (2.7**0.5 + 1e-6)] * 2)
    assert shown.advantage_note == "reinforce_plus_plus, 4 of the group count, 2 groups in the batch"
    alone = show(run, "train/0/other/0")  # a group of one has signal where nothing is compared within it
    assert alone.advantages == pytest.approx([2.8 / (2.7**0.5 + 1e-6)] * 2)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ("overlap: {kind: async, max_staleness: 2}\n", "trajectories of this iteration were left out as stale"),
        (
            "algorithm: {credit: reinforce}\nrefill: {rounds: 2}\n",
            "reinforce looks at a whole batch, and groups of this",
        ),
        ("algorithm: {credit: gae, critic: {}}\n", "gae gives each token an advantage of its own, from a critic"),
        ("algorithm: {kl: {kind: k1, applies_to: reward}}\n", "the KL to the reference was taken off the rewards"),
    ],
)
def test_advantages_that_cannot_be_known_afterwards(tmp_path: Path, config: str, note: str) -> None:
    shown = show(run_of(tmp_path, [made("t", i, reward) for i, reward in enumerate(REWARDS)], config), "train/0/t/0")
    assert shown.advantages is None
    assert shown.advantage_note.startswith(f"unknown: {note}")


def test_the_metrics_say_whether_anything_was_left_out(tmp_path: Path) -> None:
    group = [made("t", i, reward) for i, reward in enumerate(REWARDS)]
    config = "algorithm: {credit: reinforce}\noverlap: {kind: async, max_staleness: 2}\nrefill: {rounds: 1}\n"
    run = run_of(tmp_path, group, config)
    rows = (
        '{"iteration": 0, "warm_start": {}}\n{"iteration": 0, "members": 4}\n{"iteration": 1, "stale_dropped": 3}\n{"it'
    )
    (run / "metrics.jsonl").write_text(rows)
    assert show(run, "train/0/t/0").advantages == (0.5, 0.5)
    for row, note in (({"stale_dropped": 1.0}, "stale"), ({"refilled_groups": 2.0}, "replaced")):
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": 0, **row}) + "\n")
        shown = show(run, "train/0/t/0")
        assert shown.advantages is None
        assert note in shown.advantage_note


def test_the_outcome_policy_is_the_configs(tmp_path: Path) -> None:
    group = [made("t", i, reward) for i, reward in enumerate(REWARDS)]
    group.append(made("t", 4, 1.0, outcome=Outcome.CONTEXT_OVERFLOW))
    masked = run_of(tmp_path / "a", group)
    shown = show(masked, "train/0/t/4")
    assert (shown.advantages, shown.advantage_note) == (
        None,
        "none: context_overflow is masked or dropped, as if never drawn",
    )
    assert show(masked, "train/0/t/0").advantage_note == "grpo, 4 of the group count"
    kept = run_of(tmp_path / "b", group, "outcomes: {context_overflow: {train: true}}\n")
    assert show(kept, "train/0/t/4").advantage_note == "grpo, 5 of the group count"


@pytest.mark.parametrize(
    ("name", "config", "note"),
    [
        ("validation/0/t/0", "seed: 0\n", "none: the phase validation is not trained on by reinforcement"),
        ("train/0/same/0", "seed: 0\n", "none: the group has no signal and was dropped (grpo, 2 of the group count)"),
        ("train/0/t/1/0", "seed: 0\n", "none: this attempt was repeated, only the last one counts"),
        ("train/0/t/0", "play: {phase: rollout}\n", "unknown: not the run of a training"),
        ("train/0/t/0", "algorithm: {credit: gea}\n", "unknown: unknown credit 'gea'"),
        ("train/0/t/0", "algorithm: {credit: {kind: grpo, std: 1}}\n", "unknown: algorithm.credit: unknown field"),
    ],
)
def test_why_there_is_no_advantage(tmp_path: Path, name: str, config: str, note: str) -> None:
    group = [made("t", 0, 1.0), made("t", 1, None, final=False), made("t", 1, 0.0, attempt=1)]
    group += [made("same", 0, 0.5), made("same", 1, 0.5), made("t", 0, 1.0, phase="validation")]
    shown = show(run_of(tmp_path, group, config), name)
    assert shown.advantages is None
    assert shown.advantage_note.startswith(note)


def test_a_group_without_signal_that_is_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, [made("t", i, 0.5) for i in range(2)], "algorithm: {zero_variance: keep}\n")
    assert show(run, "train/0/t/0").advantages == (0.0, 0.0)


def test_the_default_credit_is_the_learners() -> None:
    from stepgym.train.config import LearnerConfig

    assert LearnerConfig().credit.kind == DEFAULT_CREDIT


# ---- the record as JSON ---------------------------------------------------------------------------------------------


def test_the_record_is_json(run: Path) -> None:
    found = json.loads(json.dumps(show(run, "train/0/t/1/0/0").to_dict(), allow_nan=False))
    record = found["trajectory"]
    assert (record["id"], record["outcome"], record["reward"]) == ("train/0/t/1/0/0", "completed", 1.0)
    first, second = record["steps"]
    assert (first["prompt_ids"], first["response_ids"], first["loss_mask"]) == ([1, 2], [3, 4], [1, 1])
    assert first["logprobs"] == [-0.5, {"$stepgym": ["float", "-inf"]}]
    assert (second["prompt_ids"], second["follows"], second["reward"]) == ([1, 2, 3, 4, 5], 0, 1.0)
    assert len(found["group"]) == 5
    assert len(found["advantages"]) == 2


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_the_texts_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(["How old is Ælfgifu? 12 €"] * 9)
    tokenizer.save_pretrained(tmp_path)
    texts = TokenTexts(tmp_path)
    ids = tokenizer.encode("How old?\n", add_special_tokens=False)
    assert "".join(texts[token] for token in ids) == "How old?\n"
    parts = [texts[token] for token in tokenizer.encode("\U0001f3b2", add_special_tokens=False)]
    assert "".join(parts) == "\\xf0\\x9f\\x8e\\xb2"  # no token is a whole character
    assert texts[tokenizer.eos_token_id] == tokenizer.eos_token
    assert texts[10**6] == "?"


def test_both_ways_to_read_a_tokenizer_say_the_same(tmp_path: Path) -> None:
    from stepgym.inspect import token_text

    tokenizer = build_tiny_tokenizer(["How old is Ælfgifu? 12 €"] * 9)
    tokenizer.save_pretrained(tmp_path)
    quick, slow = TokenTexts(tmp_path), TokenTexts(tmp_path)
    slow._tokenizer = token_text._Slow(tokenizer)
    for token in range(len(tokenizer) + 1):
        assert quick[token] == slow[token]


def test_where_a_runs_tokenizer_is_found(run: Path, tmp_path: Path) -> None:
    recorded = RecordedRun.of(run)
    assert find_token_texts(recorded) is None
    tokenizer = build_tiny_tokenizer(["How old?"] * 9)
    for folder in ("checkpoints/update-00000002/model", "checkpoints/update-00000010/model"):
        tokenizer.save_pretrained(run / folder)
    found = find_token_texts(recorded)
    assert found is not None
    assert found.source.endswith("update-00000010/model")
    tokenizer.save_pretrained(run / "renderer")
    kept = find_token_texts(recorded)
    assert kept is not None
    assert kept.source.endswith("run/renderer")
    with pytest.raises(UserError, match="there is no such folder with a tokenizer"):
        find_token_texts(recorded, str(tmp_path / "nowhere"))
    (run / "renderer" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        find_token_texts(recorded)


@given(
    st.text(alphabet=st.characters(), max_size=40)
    | st.text(alphabet="\x00\x1b\x9b\x7f\u202e\ud800\r\n\t[31mA", max_size=20)
)
def test_nothing_that_steers_a_terminal_stays(text: str) -> None:
    import unicodedata

    line = plain(text)
    assert all(unicodedata.category(character)[0] not in "C" for character in line)
    assert "\u2028" not in line
    line.encode()
    kept = plain(text, lines=True)
    assert kept.count("\n") == text.count("\n")
    assert all(character == "\n" or unicodedata.category(character)[0] != "C" for character in kept)


def test_what_is_plain_stays_as_it_is() -> None:
    assert plain("Ælfgifu says: 12 € – 色 [bold]x[/bold]") == "Ælfgifu says: 12 € – 色 [bold]x[/bold]"
    assert plain("a\x1b[2Jb\r\n\u202ec") == "a\\e[2Jb\\r\\n\\u202ec"
    assert plain("a\tb\r\nc", lines=True) == "a   b\nc"


def test_a_long_text_says_how_much_was_cut() -> None:
    assert shortened("x" * 30, 30) == "x" * 30
    cut = shortened("a" * 20 + "b" * 1010, 30)
    assert cut == "a" * 20 + " [… 1,000 characters cut …] " + "b" * 10
