from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stepgym.errors import UserError
from stepgym.record.step import Step
from stepgym.record.trajectory import Trajectory
from stepgym.train.policy import Policy
from stepgym.train.sft import SFTConfig, sft


def scripted(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory, steps=[replace(step, sampler="scripted", logprobs=None, sampling=None) for step in trajectory.steps]
    )


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def test_it_learns_scripted_episodes_by_heart(make: SimpleNamespace) -> None:
    policy = make.policy()
    made = [scripted(make.trajectory(i, task=f"task {i}", turns=2)) for i in range(4)]
    seen = []
    config = SFTConfig(updates=60, batch_size=4, optimizer={"learning_rate": 1e-2, "warmup_updates": 5})
    report = sft(policy, made, config, progress=lambda number, metrics: seen.append((number, dict(metrics))))
    assert report.updates == 60
    assert seen[0][1]["loss"] > 2.0
    assert seen[0][1]["accuracy"] < 0.5
    assert report.loss < 0.1
    assert report.accuracy > 0.98
    assert [number for number, _ in seen] == list(range(1, 61))
    assert report.tokens == sum(metrics["tokens_forward"] for _, metrics in seen)


def test_the_loss_is_the_cross_entropy_of_generated_tokens_at_temperature_one(make: SimpleNamespace) -> None:
    policy = make.policy()
    sampled = make.trajectory(1, turns=3, breaks=(2,), masked_tokens=True, temperature=0.3)
    total, count = 0.0, 0
    for step in sampled.steps:
        ids = torch.from_numpy(step.full_ids.astype("int64"))
        with torch.no_grad():
            table = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0], -1)
        start = len(step.prompt_ids)
        logprobs = table[torch.arange(start - 1, len(ids) - 1), ids[start:]]
        mask = torch.from_numpy(step.loss_mask.astype(bool))
        total, count = total - logprobs[mask].sum().item(), count + int(mask.sum())
    seen = []
    for layout in ("tree", "merged", "steps"):
        config = SFTConfig(updates=1, batch_size=1)
        sft(make.policy(layout=layout), [sampled], config, progress=lambda _, metrics: seen.append(dict(metrics)))
    for metrics in seen:
        assert metrics["loss"] == pytest.approx(total / count, rel=1e-4)
        assert metrics["tokens_trained"] == count


def test_micro_batches_and_layouts_do_not_change_the_result(make: SimpleNamespace) -> None:
    made = [scripted(make.trajectory(i, sample=i, turns=1 + i % 3)) for i in range(6)]
    for reduction in ("token", "trajectory"):
        results = []
        for layout, budget in (("merged", 16384), ("steps", 16384), ("tree", 16384), ("tree", 40)):
            policy = make.policy(dtype="float64", budget=budget, layout=layout)
            sft(
                policy,
                made,
                SFTConfig(updates=3, batch_size=4, reduction=reduction, optimizer={"eps": 1e-3}),
            )
            results.append(weights(policy))
        for other in results[1:]:
            assert (results[0] - other).abs().max() < 1e-8


def test_seeds_reproduce_and_differ(make: SimpleNamespace) -> None:
    made = [scripted(make.trajectory(i, sample=i)) for i in range(8)]
    results = []
    for seed in (0, 0, 1):
        policy = make.policy()
        sft(policy, made, SFTConfig(updates=3, batch_size=3, seed=seed))
        results.append(weights(policy))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_each_pass_takes_every_trajectory_once(make: SimpleNamespace) -> None:
    from stepgym.train.sft import _Data

    made = [scripted(make.trajectory(i, sample=i)) for i in range(5)]
    data = _Data(made)
    drawn = [number for batch in data.batches(SFTConfig(updates=5, batch_size=2)) for number in batch]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5))


def test_an_update_holds_its_own_tokens_only(make: SimpleNamespace) -> None:
    """Whatever the size of the data set."""
    from stepgym.train.losses.reduction import ReductionConfig
    from stepgym.train.sft import _Data

    made = [scripted(make.trajectory(i, sample=i, turns=1 + i % 3)) for i in range(5)]
    batch, weight = _Data(made).gather([3, 1, 3], ReductionConfig(kind="trajectory"))
    counts = [sum(len(step.response_ids) for step in made[i].steps) for i in (3, 1, 3)]
    assert len(batch.tokens) == len(weight) == sum(counts)
    assert weight.tolist() == pytest.approx(
        [1 / 2 / (2 * counts[0])] * counts[0] + [1 / 2 / counts[1]] * counts[1] + [1 / 2 / (2 * counts[0])] * counts[0]
    )
    assert [path.token for path in batch.paths] == [0, *(sum(map(len, targets)) for targets in prefixes(batch.paths))]


def prefixes(paths: list) -> list:
    return [[path.target for path in paths[:end]] for end in range(1, len(paths))]


def test_nothing_to_learn_from_is_refused(make: SimpleNamespace) -> None:
    empty = replace(make.trajectory(), steps=[Step(prompt_ids=[1], response_ids=[])])
    for made in ([], [empty], [make.trajectory(final=False)]):
        with pytest.raises(UserError, match="has a generated token to learn from"):
            sft(make.policy(), made)
    with pytest.raises(UserError, match="it has no token ids"):
        sft(make.policy(), [replace(empty, steps=[Step(prompt_ids=None, response_ids=None)])])
