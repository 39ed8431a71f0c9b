"""Promise 1: "Materialising a step gives exactly the ids that the engine was sent and returned." """

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.delta import find_deltas, materialise
from stepgym.record.outcome import Outcome
from stepgym.record.step import Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId

tokens = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    """Turns that extend, rewrite, repeat or ignore any earlier turn, and turns without ids."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 10))):
        if draw(st.integers(0, 9)) == 0:
            steps.append(Step(prompt_ids=None, response_ids=None))
            continue
        known = [step.full_ids.tolist() for step in steps if step.prompt_ids is not None]
        base = draw(st.sampled_from([[], *known]))
        base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        steps.append(Step(prompt_ids=base + draw(tokens), response_ids=draw(tokens)))
    return steps


def ids_of(step: Step) -> tuple[list[int] | None, list[int] | None]:
    if step.prompt_ids is None or step.response_ids is None:
        return None, None
    return step.prompt_ids.tolist(), step.response_ids.tolist()


@settings(deadline=None)
@given(step_lists())
def test_deltas_give_the_ids_back(steps):
    deltas = find_deltas(steps)
    new_ids = [None if s.prompt_ids is None else s.prompt_ids[d.keep :] for s, d in zip(steps, deltas, strict=True)]
    arrays = materialise(deltas, new_ids, [step.response_ids for step in steps])
    for step, (prompt_ids, response_ids) in zip(steps, arrays, strict=True):
        back = Step(prompt_ids=prompt_ids, response_ids=response_ids)
        assert ids_of(back) == ids_of(step)


def test_a_store_gives_the_ids_back(tmp_path):
    steps, history = [], [1, 2, 3]
    for turn in range(6):
        response = [10 * turn + 4, 10 * turn + 5]
        steps.append(Step(prompt_ids=history, response_ids=response))
        # Every other turn loses what it thought, as a template that strips thinking would have it.
        history = [*history, *response[turn % 2 :], 7]
    trajectory = Trajectory(id=TrajectoryId("train", 0, "t", 0), outcome=Outcome.COMPLETED, steps=steps)
    with TrajectoryStore(tmp_path, "a") as store:
        store.append(trajectory)
    back = TrajectoryStore(tmp_path).load(trajectory.id)
    assert [ids_of(step) for step in back.steps] == [ids_of(step) for step in steps]
