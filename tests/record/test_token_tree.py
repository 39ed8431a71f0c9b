from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.record.merge import merge_steps
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.token_tree import TokenTree
from stepgym.record.trajectory import Trajectory, TrajectoryId

tokens = st.lists(st.sampled_from([0, 1, 2, 256, 70_000]), max_size=5)


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 10))):
        base = draw(st.sampled_from([[], *(step.full_ids.tolist() for step in steps)]))
        response = draw(tokens)
        logprobs = None if draw(st.booleans()) else [-0.5] * len(response)
        mask = [draw(st.integers(0, 1)) for _ in response]
        prompt = base[: len(base) - draw(st.integers(0, 1)) * (len(base) // 2)] + draw(tokens)
        steps.append(Step(prompt_ids=prompt, response_ids=response, logprobs=logprobs, loss_mask=mask))
    return steps


@settings(deadline=None)
@given(step_lists())
def test_every_step_reads_back_as_it_was(steps):
    tree = TokenTree(steps)
    for i, step in enumerate(steps):
        path = tree.path(i)
        assert tree.tokens[path].tolist() == step.full_ids.tolist()
        assert tree.depth[path].tolist() == list(range(step.length))
        assert tree.parent[path].tolist() == [-1, *path[:-1].tolist()][: len(path)]


@settings(deadline=None)
@given(step_lists())
def test_a_node_is_a_distinct_prefix(steps):
    tree = TokenTree(steps)
    prefixes = {tuple(step.full_ids[: n + 1].tolist()) for step in steps for n in range(step.length)}
    assert len(tree) == len(prefixes)
    assert {tuple(tree.tokens[tree.path_to(node)].tolist()) for node in range(len(tree))} == prefixes
    assert tree.total_tokens == sum(step.length for step in steps)


@settings(deadline=None)
@given(step_lists())
def test_visible_is_to_lie_on_the_path_and_intervals_nest(steps):
    tree = TokenTree(steps)
    for query in range(len(tree)):
        on_path = set(tree.path_to(query).tolist())
        assert {key for key in range(len(tree)) if tree.visible(query, key)} == on_path
    nodes = np.arange(len(tree))
    grid = tree.visible(nodes[:, None], nodes[None, :])
    assert grid.shape == (len(tree), len(tree))
    assert grid.sum() == (tree.depth + 1).sum()
    inner = nodes[tree.parent >= 0]
    assert (tree.end[inner] <= tree.end[tree.parent[inner]]).all()
    assert (tree.end > nodes).all()


@settings(deadline=None)
@given(step_lists())
def test_occurrences_are_the_sampled_tokens_in_order(steps):
    tree = TokenTree(steps)
    expected = [(i, k) for i, step in enumerate(steps) for k in range(len(step.response_ids))]
    assert list(zip(tree.occ_step.tolist(), tree.occ_token.tolist(), strict=True)) == expected
    for i, step in enumerate(steps):
        own = slice(tree.step_start[i], tree.step_start[i + 1])
        assert tree.occ_node[own].tolist() == tree.path(i)[len(step.prompt_ids) :].tolist()
        assert tree.tokens[tree.occ_node[own]].tolist() == step.response_ids.tolist()
        assert tree.occ_loss_mask[own].tolist() == step.loss_mask.tolist()
        if step.logprobs is None:
            assert np.isnan(tree.occ_logprob[own]).all()
        else:
            assert tree.occ_logprob[own].tolist() == step.logprobs.tolist()


@settings(deadline=None)
@given(step_lists(), st.randoms(use_true_random=False))
def test_the_tree_does_not_depend_on_the_order_of_steps(steps, random):
    shuffled = random.sample(steps, len(steps))
    for name in ("tokens", "depth", "parent", "end"):
        assert getattr(TokenTree(steps), name).tolist() == getattr(TokenTree(shuffled), name).tolist()


@settings(deadline=None)
@given(step_lists())
def test_merged_sequences_are_paths_of_the_tree(steps):
    tree = TokenTree(steps)
    sequences, report = merge_steps(steps)
    for sequence in sequences:
        assert tree.tokens[tree.path(sequence.steps[-1])].tolist() == sequence.full_ids.tolist()
    assert len(tree) <= report.tokens_after <= report.tokens_before == tree.total_tokens


@settings(deadline=None)
@given(step_lists())
def test_paths_leaves_and_branches(steps):
    tree = TokenTree(steps)
    children = {node: sorted(np.flatnonzero(tree.parent == node)) for node in range(len(tree))}
    assert tree.leaves.tolist() == [node for node, below in children.items() if not below]
    assert tree.branches.tolist() == [node for node, below in children.items() if len(below) > 1]
    assert tree.roots.tolist() == [node for node in range(len(tree)) if tree.depth[node] == 0]
    assert [path[-1] for path in tree.paths()] == tree.leaves.tolist()


def test_a_group_that_shares_its_prompt():
    steps = [Step(prompt_ids=[5, 6, 7], response_ids=[8, n]) for n in (1, 2, 1)]
    tree = TokenTree(steps)
    assert tree.tokens.tolist() == [5, 6, 7, 8, 1, 2]
    assert tree.depth.tolist() == [0, 1, 2, 3, 4, 4]
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 3]
    assert tree.end.tolist() == [6, 6, 6, 6, 5, 6]
    assert tree.occ_node.tolist() == [3, 4, 3, 5, 3, 4]
    assert (tree.leaves.tolist(), tree.branches.tolist()) == ([4, 5], [3])
    assert repr(tree) == "TokenTree(3 steps, 15 tokens, 6 unique)"


def test_a_batch_of_trajectories():
    def trajectory(sample: int) -> Trajectory:
        steps = [Step(prompt_ids=[1], response_ids=[sample]), Step(prompt_ids=[1, sample, 9], response_ids=[3])]
        return Trajectory(id=TrajectoryId("train", 0, "t", sample), outcome=Outcome.COMPLETED, steps=steps)

    tree = TokenTree.from_trajectories([trajectory(4), trajectory(5)])
    assert len(tree) == 7
    assert tree.occ_step.tolist() == [0, 1, 2, 3]


def test_steps_without_ids_are_refused():
    with pytest.raises(UserError, match="step 0 has no token ids"):
        TokenTree([Step(prompt_ids=None, response_ids=None)])
