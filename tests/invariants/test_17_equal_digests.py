"""Promise 17: "The same seeds and a deterministic engine give equal content digests (records sorted by id, times
excluded)."

Here for records: however the same content was ordered, split into shards and timed, its digest is the same.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.record.digest import content_digest
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId


def sampled(seed: int, size: int) -> list[Trajectory]:
    """Trajectories that depend on the seed only, except for the times in them."""
    trajectories = []
    for sample in range(size):
        rng = random.Random(f"{seed}/{sample}")
        steps, history = [], [1, 2]
        for _ in range(rng.randint(1, 4)):
            response = [rng.randint(3, 99) for _ in range(rng.randint(0, 5))]
            metrics = {"latency_s": random.SystemRandom().random()}
            logprobs = [-rng.random() for _ in response]
            message = {"role": "assistant", "content": str(response), "odd": float("nan")}
            steps.append(
                Step(prompt_ids=history, response_ids=response, logprobs=logprobs, message=message, metrics=metrics)
            )
            history = [*history, *response, 0]
        trajectories.append(
            Trajectory(
                id=TrajectoryId("train", 0, f"t{sample % 2}", sample),
                outcome=Outcome.COMPLETED,
                steps=[replace(step, sampling=Sampling(temperature=0.7)) for step in steps],
                reward=rng.random(),
                started_at=random.SystemRandom().random(),
                metrics={"wall_s": random.SystemRandom().random(), "turns": len(steps)},
            )
        )
    return trajectories


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.randoms(use_true_random=False), st.integers(1, 4))
def test_equal_content_has_equal_digests(tmp_path_factory, seed, size, order, flush_every):
    digest = content_digest(sampled(seed, size))
    again = sampled(seed, size)
    order.shuffle(again)
    assert content_digest(again) == digest
    folder = tmp_path_factory.mktemp("store")
    with TrajectoryStore(folder, "a", flush_every=flush_every) as store:
        for trajectory in again:
            store.append(trajectory)
    assert content_digest(TrajectoryStore(folder)) == digest
    assert content_digest(sampled(seed + 1, size)) != digest
