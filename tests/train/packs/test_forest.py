from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.token_tree import TokenTree
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.packs.batch import Batch, make_batch
from stepgym.train.packs.forest import forests
from stepgym.train.packs.micro_batch import Layout, MicroBatch
from stepgym.train.packs.rows import padded_rows

small = st.lists(st.integers(0, 2), max_size=5)
steps = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), small, st.sampled_from([1.0, 0.5])), max_size=8
)


def batch_of(made: list[tuple[list[int], list[int], float]], trajectories: int = 2) -> Batch:
    """Steps dealt out to some trajectories."""
    whole = [
        Step(prompt_ids=prompt, response_ids=response, sampling=Sampling(temperature=temperature))
        for prompt, response, temperature in made
    ]
    return make_batch(
        [
            [Trajectory(id=TrajectoryId("train", 0, "t", i), outcome=Outcome.COMPLETED, steps=whole[i::trajectories])]
            for i in range(trajectories)
        ]
    )


def way_to(micro: MicroBatch, node: int) -> list[int]:
    """Ids that a node attends to, in order, by the definition of the mask."""
    if micro.tree is None:
        row, place = divmod(node, micro.ids.shape[1])
        return micro.ids[row, : place + 1].tolist()
    return [int(micro.ids[0, k]) for k in range(node + 1) if node < micro.tree.end[k]]


def expected(batch: Batch) -> dict[int, tuple[list[int], int, float]]:
    """Of each trained token: what stands before it in its step, the token, its temperature."""
    found = {}
    for path in batch.paths:
        for k, (position, target) in enumerate(zip(path.position, path.target, strict=True)):
            token = path.token + k
            found[token] = (path.ids[:position].tolist(), int(target), float(batch.tokens.temperature[token]))
    return found


def read(micros: list[MicroBatch]) -> dict[int, tuple[list[int], int, float]]:
    found = {}
    for micro in micros:
        which = range(len(micro.token)) if micro.which is None else micro.which.tolist()
        for token, k in zip(micro.token.tolist(), which, strict=True):
            assert token not in found
            temperature = 1.0 if micro.temperature is None else float(micro.temperature[k])
            found[token] = (way_to(micro, int(micro.place[k])), int(micro.target[k]), temperature)
    return found


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 3), st.sampled_from(["tree", "merged", "steps"]), st.integers(1, 40), st.booleans())
def test_every_trained_token_is_predicted_once_from_exactly_what_stood_before_it(
    made: list[tuple[list[int], list[int], float]], trajectories: int, layout: Layout, budget: int, rows: bool
) -> None:
    batch = batch_of(made, trajectories)
    micros = list((padded_rows if rows else forests)(batch, layout, budget))
    assert read(micros) == expected(batch)
    for micro in micros:
        if micro.tree is not None:
            assert micro.position is not None
            depth = [len(way_to(micro, node)) - 1 for node in range(micro.tokens)]
            assert micro.position[0].tolist() == micro.tree.depth.tolist() == depth
            assert micro.visible_pairs == sum(d + 1 for d in depth)


@given(steps)
def test_a_forest_has_the_nodes_of_the_token_tree_that_predict_something(
    made: list[tuple[list[int], list[int], float]],
) -> None:
    batch = batch_of(made, 1)
    (trajectory,) = [  # the same steps without their last token, which predicts nothing
        [Step(prompt_ids=path.ids, response_ids=[]) for path in batch.paths]
    ]
    micros = list(forests(batch, "tree", 10**9))
    assert sum(micro.tokens for micro in micros) == len(TokenTree(trajectory)) == batch.unique_tokens
    assert len(micros) == (1 if batch.paths else 0)


def test_equal_samples_share_predictions_and_keep_their_own_occurrences() -> None:
    batch = batch_of([([1, 2], [3, 4], 1.0), ([1, 2], [3, 5], 1.0), ([1, 2], [3, 4], 0.5)])
    (micro,) = forests(batch, "tree", 100)
    assert micro.ids.tolist() == [[1, 2, 3]]
    assert micro.which is not None
    assert len(micro.token) == 6
    # 3 and 4 after the same prefix at two temperatures, and 5: five different predictions.
    assert len(micro.target) == 5
    assert sorted(micro.target.tolist()) == [3, 3, 4, 4, 5]


def test_layouts_share_as_much_as_they_say(make: SimpleNamespace) -> None:
    made = [make.group(1, [1, 0, 1, 0]), make.group(2, [0, 1], task="b", breaks=(1,), turns=(4,))]
    batch = make_batch(made)
    sizes = {
        layout: sum(m.tokens for m in forests(batch, layout, 10**9))  # type: ignore[arg-type]
        for layout in ("tree", "merged", "steps")
    }
    assert sizes["steps"] == sum(len(path.ids) for path in batch.paths)
    last = {path.chain: len(path.ids) for path in batch.paths}
    assert sizes["merged"] == sum(last.values())
    assert sizes["tree"] == batch.unique_tokens < sizes["merged"] < sizes["steps"]


def test_rows_are_padded_to_the_budget(make: SimpleNamespace) -> None:
    batch = make_batch([make.group(1, [1, 0, 1]), make.group(2, [0, 1], task="b", breaks=(1,))])
    for micro in padded_rows(batch, "merged", 70):
        assert micro.tokens <= 70 or micro.ids.shape[0] == 1
        assert micro.visible_pairs == micro.ids.shape[0] * micro.ids.shape[1] * (micro.ids.shape[1] + 1) // 2


def test_a_prompt_of_many_samples_stands_once() -> None:
    stem = np.arange(50)
    made = [Step(prompt_ids=stem, response_ids=[100 + sample, 7, 8]) for sample in range(300)]
    batch = make_batch([[Trajectory(id=TrajectoryId("t", 0, "t", 0), outcome=Outcome.COMPLETED, steps=made)]])
    (micro,) = forests(batch, "tree", 10**9)
    assert micro.tokens == 50 + 2 * 300
    assert micro.tree is not None
    assert micro.tree.segments[0].tolist() == [0, 50, 650]
    assert len(micro.tree.segments) == 301
    assert torch.equal(micro.ids[0, :50], torch.from_numpy(stem))
