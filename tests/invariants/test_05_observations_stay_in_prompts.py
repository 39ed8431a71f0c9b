"""Promise 5: "A step's response holds no observation token; the observation is in the next step's prompt."

Here: neither storing nor merging nor the tree moves an observed token into what counts as sampled.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.merge import merge_steps
from stepgym.record.outcome import Outcome
from stepgym.record.schema import from_table, to_table
from stepgym.record.step import Step
from stepgym.record.token_tree import TokenTree
from stepgym.record.trajectory import Trajectory, TrajectoryId

SAMPLED, OBSERVED = 1000, 1


@st.composite
def conversations(draw: st.DrawFn) -> list[Step]:
    """Turns whose sampled ids are 1000 and more and whose observed ids are less; some histories are rewritten."""
    steps: list[Step] = []
    history = [OBSERVED]
    for _ in range(draw(st.integers(1, 8))):
        response = draw(st.lists(st.integers(SAMPLED, SAMPLED + 3), max_size=4))
        steps.append(Step(prompt_ids=history, response_ids=response, logprobs=[-1.0] * len(response)))
        kept = response[draw(st.sampled_from([0, 0, 0, 1])) :]
        history = [*history, *kept, *draw(st.lists(st.integers(OBSERVED, OBSERVED + 3), max_size=4))]
    return steps


@settings(deadline=None)
@given(conversations())
def test_only_sampled_tokens_count_as_sampled(steps):
    trajectory = Trajectory(id=TrajectoryId("train", 0, "t", 0), outcome=Outcome.COMPLETED, steps=steps)
    (stored,) = from_table(to_table([trajectory]))
    assert all((step.response_ids >= SAMPLED).all() for step in stored.steps)

    tree = TokenTree(stored.steps)
    assert (tree.tokens[tree.occ_node] >= SAMPLED).all()
    assert len(tree.occ_node) == sum(len(step.response_ids) for step in steps)

    sequences, _ = merge_steps(stored.steps)
    for sequence in sequences:
        sampled = sequence.step_index >= 0
        assert (sequence.response_ids[sampled] >= SAMPLED).all()
        assert (sequence.response_ids[sequence.loss_mask != 0] >= SAMPLED).all()
    assert sum(int(s.loss_mask.sum()) for s in sequences) == len(tree.occ_node)
