from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.record.digest import content_digest
from stepgym.record.outcome import Outcome
from stepgym.record.schema import SCHEMA, from_table, to_table
from stepgym.record.step import Sampling, Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId


def trajectory(sample: int = 0, **fields) -> Trajectory:
    first = Step(prompt_ids=[1, 2, 3], response_ids=[4, sample], logprobs=[-0.5, -1.0], rendering="first")
    second = Step(prompt_ids=[1, 2, 3, 4, sample, 6], response_ids=[7], logprobs=[-2.0], reward=1.0)
    values = {
        "id": TrajectoryId("train", 3, "task/7", sample),
        "outcome": Outcome.COMPLETED,
        "steps": [first, second],
        "reward": 1.0,
        **fields,
    }
    return Trajectory(**values)


text = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["\ud83d\ude00", "a\x00b"])
numbers = st.floats(allow_nan=False, width=32)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
mappings = st.dictionaries(text, json_values, max_size=2)


@st.composite
def any_steps(draw: st.DrawFn) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 4))):
        fields = {
            "reward": draw(numbers),
            "new_messages": draw(st.lists(mappings, max_size=2)),
            "message": draw(st.none() | mappings),
            "finish_reason": draw(text),
            "rendering": draw(st.sampled_from(["", "first", "extended"])),
            "status": draw(st.sampled_from(["ok", "malformed"])),
            "sampler": draw(st.sampled_from(["policy", "scripted"])),
            "sampling": draw(st.none() | st.builds(Sampling, temperature=numbers, top_k=st.integers(0, 9))),
            "weights_versions": draw(st.lists(st.tuples(text, st.integers(0, 3), st.integers(0, 3)), max_size=2)),
            "metrics": draw(st.dictionaries(text, numbers, max_size=2)),
            "reward_parts": draw(st.dictionaries(text, numbers, max_size=2)),
        }
        if draw(st.integers(0, 4)) == 0:
            steps.append(Step(prompt_ids=None, response_ids=None, **fields))
            continue
        known = [step for step in steps if step.prompt_ids is not None]
        base = draw(st.sampled_from([[], *(step.full_ids.tolist() for step in known)]))
        prompt, response = (
            base + draw(st.lists(st.integers(0, 3), max_size=3)),
            draw(st.lists(st.integers(0, 3), max_size=3)),
        )
        logprobs = draw(st.none() | st.lists(numbers, min_size=len(response), max_size=len(response)))
        experts = None
        if draw(st.booleans()):
            flat = draw(st.lists(st.integers(-1, 2), min_size=4 * (len(prompt) + len(response)), max_size=200))
            size = len(prompt) + len(response)
            experts = np.array(flat[: 4 * size], dtype=np.int16).reshape(size, 2, 2)
        steps.append(
            Step(prompt_ids=prompt, response_ids=response, logprobs=logprobs, routed_experts=experts, **fields)
        )
    return steps


trajectories = st.builds(
    Trajectory,
    id=st.builds(TrajectoryId, st.just("train"), st.integers(0, 2**40), text, st.integers(0, 9), st.integers(0, 9)),
    outcome=st.sampled_from(Outcome),
    outcome_detail=text,
    final=st.booleans(),
    steps=any_steps(),
    reward=st.none() | numbers,
    reward_parts=st.dictionaries(text, numbers, max_size=2),
    success=st.none() | st.booleans(),
    task=mappings,
    tools=st.lists(mappings, max_size=2),
    env_id=text,
    env_config=mappings,
    reward_range=st.tuples(numbers, numbers),
    seeds=st.dictionaries(text, st.integers(0, 2**63), max_size=2),
    error=text,
    metrics=st.dictionaries(text, numbers, max_size=2),
    provenance=mappings,
    started_at=numbers,
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=80, deadline=None)
@given(st.lists(trajectories, max_size=2))
def test_every_field_comes_back_as_it_was(written):
    read = from_table(to_table(written))
    assert content_digest(read) == content_digest(written)
    for before, after in zip(written, read, strict=True):
        for name in ("id", "outcome", "outcome_detail", "final", "reward", "success", "task", "env_config", "seeds"):
            assert getattr(after, name) == getattr(before, name)
        assert (after.error, after.started_at) == (before.error, before.started_at)
        for old, new in zip(before.steps, after.steps, strict=True):
            for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "routed_experts"):
                left, right = getattr(old, name), getattr(new, name)
                assert (left is None) == (right is None)
                if left is not None:
                    assert (left.dtype, left.shape, left.tolist()) == (right.dtype, right.shape, right.tolist())
            assert (new.message, new.sampling, new.metrics) == (old.message, old.sampling, old.metrics)
            assert [tuple(span) for span in new.weights_versions] == [tuple(span) for span in old.weights_versions]


def test_what_is_written_is_read(tmp_path):
    with TrajectoryStore(tmp_path / "deep" / "store", "a") as store:
        for sample in range(5):
            store.append(trajectory(sample))
        assert store.flush() == [trajectory(sample).id for sample in range(5)]
        assert store.flush() == []
    reader = TrajectoryStore(tmp_path / "deep" / "store")
    assert len(reader) == 5
    assert [t.id.sample for t in reader] == [0, 1, 2, 3, 4]
    assert reader.ids() == [trajectory(sample).id for sample in range(5)]
    assert trajectory(3).id in reader
    for key in (trajectory(3).id, "train/3/task/7/3/0"):
        assert reader.load(key).steps[1].prompt_ids.tolist() == [1, 2, 3, 4, 3, 6]


def test_prompts_are_stored_as_deltas(tmp_path):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
    steps = TrajectoryStore(tmp_path).table(["steps"]).column("steps")[0].as_py()
    assert [(s["parent"], s["keep"], s["new_ids"]) for s in steps] == [(-1, 0, [1, 2, 3]), (0, 5, [6])]


def test_a_store_opened_again_goes_on(tmp_path):
    for sample in range(3):
        with TrajectoryStore(tmp_path, "a") as store:
            assert len(store) == sample
            store.append(trajectory(sample))
    assert len(TrajectoryStore(tmp_path)) == 3


def test_what_waits_can_be_read_by_its_own_store(tmp_path):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
        assert trajectory().id in store
        assert len(store) == 1
        assert store.load(trajectory().id).reward == 1.0
        assert list(tmp_path.glob("*.parquet")) == []
        assert [t.id for t in store] == [trajectory().id]


def test_an_id_is_stored_once(tmp_path):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
        with pytest.raises(UserError, match="already in the store"):
            store.append(trajectory())
        store.flush()
        with pytest.raises(UserError, match="already in the store"):
            store.append(trajectory())
    with TrajectoryStore(tmp_path, "a") as store, pytest.raises(UserError, match="already in the store"):
        store.append(trajectory())
    assert len(TrajectoryStore(tmp_path)) == 1


def test_writers_share_a_folder_and_a_reader_looks_on(tmp_path):
    reader_folder = tmp_path / "shared"
    with TrajectoryStore(reader_folder, "a") as one, TrajectoryStore(reader_folder, "a") as two:
        reader = TrajectoryStore(reader_folder)
        assert len(reader) == 0
        one.append(trajectory(1))
        two.append(trajectory(2))
        two.append(trajectory(1))  # neither has flushed: the second to flush finds it taken
        assert one.flush() == [trajectory(1).id]
        assert [t.id.sample for t in reader] == [1]
        assert two.flush() == [trajectory(2).id]
        assert [t.id.sample for t in reader] == [1, 2]
        assert trajectory(2).id in one
        with pytest.raises(UserError, match="already in the store"):
            one.append(trajectory(2))
    raw = pads.dataset(reader_folder, format="parquet").to_table(columns=["id"])
    assert raw.num_rows == 2


def test_a_copy_that_slipped_in_is_read_once(tmp_path):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
    (shard,) = tmp_path.glob("*.parquet")
    (tmp_path / f"9{shard.name}").write_bytes(shard.read_bytes())
    reader = TrajectoryStore(tmp_path)
    assert len(reader) == len(list(reader)) == 1


def test_a_shard_is_written_after_so_many(tmp_path):
    with TrajectoryStore(tmp_path, "a", flush_every=2, flush_seconds=600) as store:
        for sample in range(5):
            store.append(trajectory(sample))
        assert len(TrajectoryStore(tmp_path)) == 4
        assert len(store.flush()) == 5


def test_a_shard_is_written_when_the_oldest_has_waited(tmp_path):
    with TrajectoryStore(tmp_path, "a", flush_seconds=0.05) as store:
        store.append(trajectory())
        reader, deadline = TrajectoryStore(tmp_path), time.monotonic() + 20
        while len(reader) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(reader) == 1
        assert store.flush() == [trajectory().id]


def test_filters(tmp_path):
    with TrajectoryStore(tmp_path, "a", flush_every=3) as store:
        for sample in range(6):
            reward = None if sample == 5 else sample / 10
            outcome = Outcome.ENV_ERROR if sample == 5 else Outcome.COMPLETED
            store.append(trajectory(sample, reward=reward, outcome=outcome, final=sample != 4, success=sample == 0))
    store = TrajectoryStore(tmp_path)

    def samples(**filters) -> list[int]:
        return [t.id.sample for t in store.read(**filters)]

    assert samples() == [0, 1, 2, 3, 4, 5]
    assert samples(final_only=True) == [0, 1, 2, 3, 5]
    assert samples(phase="train", sample=[1, 2]) == [1, 2]
    assert samples(outcome=Outcome.ENV_ERROR) == [5]
    assert samples(outcome=["completed", "env_error"], final_only=True, success=False) == [1, 2, 3, 5]
    assert samples(reward=None) == [5]
    assert samples(reward=[None, 0.1]) == [1, 5]
    assert samples(where=pads.field("reward") > 0.2, final_only=True) == [3]
    assert samples(phase="test") == []
    assert [key.sample for key in store.ids(final_only=True)] == [0, 1, 2, 3, 5]
    assert all(t.steps == () and t.reward == t.id.sample / 10 for t in store.read(with_steps=False, sample=[1, 2]))
    assert store.table(["reward"], sample=3).to_pylist() == [{"reward": 0.3}]
    assert store.table().column_names == [name for name in SCHEMA.names if name != "steps"]
    row = store.table(sample=2).to_pylist()[0]
    assert (row["turns"], row["prompt_tokens"], row["response_tokens"]) == (2, 9, 3)


def test_a_task_id_that_utf8_cannot_hold_is_found(tmp_path):
    odd = TrajectoryId("train", 0, "\ud800/\x00", 1)
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory(id=odd))
    store = TrajectoryStore(tmp_path)
    assert [t.id for t in store.read(task_id="\ud800/\x00")] == [odd]
    assert store.load(odd).id == odd


@pytest.mark.parametrize(
    "use", [lambda s: s.read(tsk="x"), lambda s: s.table(["reward", "tsk"]), lambda s: s.table(tsk=1)]
)
def test_an_unknown_column_is_named(tmp_path, use):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
    with pytest.raises(UserError, match="no column 'tsk'; columns: id, phase"):
        use(TrajectoryStore(tmp_path))


def test_a_filter_that_does_not_fit_is_named(tmp_path):
    TrajectoryStore(tmp_path, "a").close()
    for where in (pads.field("rewrd") > 0, pads.field("reward") > "high"):
        with pytest.raises(UserError, match=r"the filter \(rew.*does not fit the store"):
            TrajectoryStore(tmp_path).read(where=where)


def test_a_disk_that_refuses_loses_nothing(tmp_path):
    folder = tmp_path / "store"
    store = TrajectoryStore(folder, "a", flush_seconds=0.05)
    folder.rmdir()
    store.append(trajectory(0))
    with pytest.raises(UserError, match="cannot"):
        store.flush()
    store.append(trajectory(1))  # the timer starts anew; where it fails, the next call says so
    time.sleep(0.3)
    with pytest.raises(UserError, match="cannot"):
        store.append(trajectory(2))
    folder.mkdir()
    assert store.flush() == [trajectory(0).id, trajectory(1).id]
    store.append(trajectory(2))
    store.close()
    assert len(TrajectoryStore(folder)) == 3


def test_a_value_of_the_wrong_type_is_named(tmp_path):
    TrajectoryStore(tmp_path, "a").close()
    with pytest.raises(UserError, match="iteration='three': the column holds int64"):
        TrajectoryStore(tmp_path).read(iteration="three")


def test_a_trajectory_that_cannot_be_stored_is_refused_and_harms_no_other(tmp_path):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory(0))
        with pytest.raises(UserError, match="cannot store train/3/task/7/1/0"):
            store.append(trajectory(1, reward="much"))
        store.append(trajectory(2))
    assert [t.id.sample for t in TrajectoryStore(tmp_path)] == [0, 2]


def test_bad_paths_and_modes_are_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path, mode, message in (
        (tmp_path / "missing", "r", "no such trajectory store"),
        (file, "r", "is a folder, this is a file"),
        (file, "a", "is a folder, this is a file"),
        (file / "below", "a", "cannot make the folder"),
        (tmp_path, "w", "mode must be 'r' or 'a'"),
    ):
        with pytest.raises(UserError, match=message):
            TrajectoryStore(path, mode)
    for options in ({"flush_every": 0}, {"flush_seconds": 0.0}):
        with pytest.raises(UserError, match="flush_every"):
            TrajectoryStore(tmp_path, "a", **options)


def test_a_store_that_is_closed_or_read_only_takes_nothing(tmp_path):
    store = TrajectoryStore(tmp_path, "a")
    store.close()
    store.close()
    for action in (lambda: store.append(trajectory()), store.flush):
        with pytest.raises(UserError, match="closed"):
            action()
    reader = TrajectoryStore(tmp_path)
    with pytest.raises(UserError, match="opened for reading"):
        reader.append(trajectory())


@pytest.mark.parametrize("content", [b"", b"not parquet at all", b"PAR1 and then some PAR1"])
def test_an_unreadable_shard_is_named(tmp_path, content):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
    (tmp_path / "broken.parquet").write_bytes(content)
    for mode in ("r", "a"):
        with pytest.raises(UserError, match=r"broken\.parquet: cannot read this trajectory shard"):
            TrajectoryStore(tmp_path, mode)


def test_a_shard_cut_short_is_named(tmp_path):
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory())
    reader = TrajectoryStore(tmp_path)
    (shard,) = tmp_path.glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:-20])
    for use in (lambda: list(reader), lambda: reader.load(trajectory().id), lambda: TrajectoryStore(tmp_path)):
        with pytest.raises(UserError, match=shard.name):
            use()


def test_tables_of_others_and_of_other_versions_are_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(UserError, match=r"foreign\.parquet: not a trajectory shard of version 2 \(its version: none\)"):
        TrajectoryStore(tmp_path)
    later = to_table([trajectory()]).replace_schema_metadata({b"stepgym.store_version": b"3"})
    pq.write_table(later, tmp_path / "foreign.parquet")
    with pytest.raises(UserError, match="its version: 3"):
        TrajectoryStore(tmp_path)


def test_a_delta_that_lies_is_an_error_that_names_the_shard(tmp_path):
    table = to_table([trajectory()])
    steps = table.column("steps").to_pylist()
    steps[0][1]["keep"] = 99
    forged = table.set_column(
        table.column_names.index("steps"), SCHEMA.field("steps"), pa.array(steps, SCHEMA.field("steps").type)
    )
    pq.write_table(forged.replace_schema_metadata(SCHEMA.metadata), tmp_path / "forged.parquet")
    with pytest.raises(UserError, match=r"forged\.parquet.*step 1: the delta"):
        list(TrajectoryStore(tmp_path))
