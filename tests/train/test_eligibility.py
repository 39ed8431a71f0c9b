from __future__ import annotations

from typing import Any

import pytest

from stepgym.errors import UserError
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.train.eligibility import require_trainable

PLAIN: dict[str, Any] = {
    "prompt_ids": [1],
    "response_ids": [2],
    "logprobs": [-1.0],
    "sampling": Sampling(temperature=0.7),
}
ALWAYS = [
    ({"sampler": "scripted", "logprobs": None}, "it is scripted"),
    ({"prompt_ids": None, "response_ids": None, "logprobs": None}, "it has no token ids"),
    ({"sampling": Sampling(temperature=0.0)}, r"it was decoded greedily \(temperature 0\)"),
]
FOR_CORRECTION = [
    ({"logprobs": None}, "it has no logprobs"),
    ({"sampling": None}, "it does not say how it was sampled"),
    ({"sampling": Sampling(logprobs_kind="raw")}, "its logprobs are of kind 'raw'"),
    ({"sampling": Sampling(logprobs_kind="unknown")}, "its logprobs are of kind 'unknown'"),
    ({"sampling": Sampling(top_p=0.95)}, r"it was sampled with top_p = 0\.95"),
    ({"sampling": Sampling(top_k=50)}, "it was sampled with top_k = 50"),
    ({"sampling": Sampling(min_p=0.1)}, r"it was sampled with min_p = 0\.1"),
    ({"sampling": Sampling(repetition_penalty=1.1)}, r"it was sampled with repetition_penalty = 1\.1"),
    ({"sampling": Sampling(presence_penalty=0.5)}, r"it was sampled with presence_penalty = 0\.5"),
    ({"sampling": Sampling(frequency_penalty=0.5)}, r"it was sampled with frequency_penalty = 0\.5"),
]


def of(change: dict[str, Any]) -> list[Trajectory]:
    steps = [Step(**PLAIN), Step(**{**PLAIN, **change})]
    return [Trajectory(id=TrajectoryId("train", 0, "a", 0), outcome=Outcome.COMPLETED, steps=steps)]


@pytest.mark.parametrize(("change", "reason"), ALWAYS)
@pytest.mark.parametrize("correction", [True, False])
def test_what_is_always_refused(change: dict[str, Any], reason: str, correction: bool) -> None:
    with pytest.raises(UserError, match=rf"trajectory train/0/a/0/0, step 1 cannot be trained on: {reason}"):
        require_trainable(of(change), correction=correction)


@pytest.mark.parametrize(("change", "reason"), FOR_CORRECTION)
def test_what_is_refused_unless_correction_is_off(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"step 1 cannot be trained on: {reason}.*set correction to none"):
        require_trainable(of(change), correction=True)
    require_trainable(of(change), correction=False)


def test_plainly_sampled_steps_are_taken() -> None:
    require_trainable(of({}), correction=True)
    require_trainable(of({"response_ids": [], "logprobs": []}), correction=True)
