"""Trajectories of known shape, for benchmarks of the trainer. Token ids are random; lengths are what matters.

(a) `mergeable`: 8 samples of a task, 6 turns, a prompt of 1000 tokens, 100 generated and 400 observed a turn.
(b) `stripped`: the same with 200 tokens of thinking before each turn's 100, which the template strips from history.
(c) `one_turn`: 8 samples of one turn, a prompt of 2000 tokens, a response of 100.
(d) `search`: lengths drawn as Search-R1's are: instructions that all tasks share, questions, up to 4 turns of up to 500
    tokens, observations of up to 500, prompts of up to 4096; 5 samples of each task, which often search alike at first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId

VOCABULARY = 4096
Ids = NDArray[np.int64]
Workload = Callable[[float], list[list[Trajectory]]]


def _draw(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, VOCABULARY, count)


def _step(rng: np.random.Generator, prompt: Ids, response: Ids) -> Step:
    logprobs = -np.log(VOCABULARY) + rng.normal(0, 0.1, len(response))
    return Step(prompt_ids=prompt, response_ids=response, logprobs=logprobs, sampling=Sampling())


def _trajectory(rng: np.random.Generator, task: int, sample: int, steps: list[Step]) -> Trajectory:
    return Trajectory(
        id=TrajectoryId("train", 1, str(task), sample),
        outcome=Outcome.COMPLETED,
        steps=steps,
        reward=float(rng.random()),
    )


def conversations(
    scale: float, *, turns: int, prompt: int, thinking: int, generated: int, observed: int, samples: int = 8
) -> list[list[Trajectory]]:
    """One group of equal shape. Lengths are multiplied by `scale`."""
    rng = np.random.default_rng(0)
    prompt, thinking, generated, observed = (round(n * scale) for n in (prompt, thinking, generated, observed))
    start = _draw(rng, prompt)
    group = []
    for sample in range(samples):
        history, steps = start, []
        for _ in range(turns):
            said = _draw(rng, thinking + generated)
            steps.append(_step(rng, history, said))
            history = np.concatenate([history, said[thinking:], _draw(rng, observed)])
        group.append(_trajectory(rng, 0, sample, steps))
    return [group]


def search(scale: float, *, tasks: int = 4, samples: int = 5) -> list[list[Trajectory]]:
    """Groups with lengths as Search-R1's. Lengths are multiplied by `scale`."""
    rng = np.random.default_rng(1)
    instructions = _draw(rng, round(170 * scale))

    def length(median: float, most: int) -> int:
        return max(2, round(scale * min(most, median * float(rng.lognormal(0, 0.6)))))

    groups = []
    for task in range(tasks):
        question = np.concatenate([instructions, _draw(rng, length(25, 200))])
        # Half of the samples search for the same thing first, and are shown the same.
        usual = (_draw(rng, length(60, 500)), _draw(rng, length(420, 500)))
        group = []
        for sample in range(samples):
            history, steps = question, []
            turns = int(rng.choice([1, 2, 3, 4], p=[0.1, 0.35, 0.35, 0.2]))
            for turn in range(turns):
                said, shown = _draw(rng, length(60, 500)), _draw(rng, length(420, 500))
                if turn == 0 and sample % 2 == 0:
                    said, shown = usual
                steps.append(_step(rng, history, said))
                history = np.concatenate([history, said, shown])[: round(4096 * scale)]
            group.append(_trajectory(rng, task, sample, steps))
        groups.append(group)
    return groups


WORKLOADS: dict[str, Workload] = {
    "a": lambda scale: conversations(scale, turns=6, prompt=1000, thinking=0, generated=100, observed=400),
    "b": lambda scale: conversations(scale, turns=6, prompt=1000, thinking=200, generated=100, observed=400),
    "c": lambda scale: conversations(scale, turns=1, prompt=2000, thinking=0, generated=100, observed=0),
    "d": search,
}
"""Name to a function of a scale: 1 for the lengths above."""
