"""Sampled against recomputed logprobs: next to nothing on a clean run, and a planted shift is found where it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepgym.env.base import Env
from stepgym.env.messages import user
from stepgym.env.task import Task
from stepgym.env.worker import run_blocking
from stepgym.errors import UserError
from stepgym.inspect.audit import GapOptions, audit
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.renderer import Renderer
from stepgym.model.renderer_files import save_renderer
from stepgym.model.tiny import build_tiny_model, save_tiny_model
from stepgym.record.step import Sampling
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.rollouts import RolloutConfig, rollout


class Echo(Env):
    """Say anything, three times."""

    max_turns = 4

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=str(n), prompt="Say it.") for n in range(3)]

    def begin(self, task: Task) -> Any:
        self.said = 0
        return [user(task.prompt)]

    def act(self, message: Any) -> Any:
        self.said += 1
        return [user("again")], 0.0, self.said == 3, False, {}


def play(model: Any, tokenizer: Any, version: str, iteration: int, temperature: float = 0.8) -> list[Trajectory]:
    engine = TransformersEngine.wrap(model, tokenizer, name="tiny", context_length=512)
    engine.weights_version = version
    run_blocking(engine.open())
    try:
        return rollout(
            Echo,
            Echo().tasks("train"),
            engine,
            renderer=Renderer(tokenizer),
            sampling=Sampling(temperature=temperature),
            config=RolloutConfig(samples=2, max_response_tokens=12),
            phase="train",
            iteration=iteration,
        )
    finally:
        run_blocking(engine.close())


def store(folder: Path, trajectories: Sequence[Trajectory]) -> Path:
    with TrajectoryStore(folder / "trajectories", "a") as kept:
        for trajectory in trajectories:
            kept.append(trajectory)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    """Two iterations: the weights of update 0, then those of update 1; both are kept as checkpoints."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    model, tokenizer = build_tiny_model(["Say it. again and again. " * 3] * 10, width=32, layers=2, heads=2)
    found = []
    for update in (0, 1):
        if update:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.5)
        checkpoint = folder / "checkpoints" / f"update-{update:08d}"
        save_tiny_model(checkpoint / "model", model, tokenizer)
        (checkpoint / "state.json").write_text(json.dumps({"update": update}))
        found += play(model, tokenizer, str(update), update + 1)
    save_renderer(Renderer(tokenizer), folder / "renderer")
    store(folder, found)
    return folder, found


def options(model: str, **more: Any) -> GapOptions:
    return GapOptions(model, device="cpu", **more)


def test_the_runs_own_checkpoints_give_the_logprobs_that_were_recorded(trained: Any) -> None:
    folder, trajectories = trained
    found = audit(folder, model=options("auto"))
    gap = found.logprob_gap
    assert gap is not None
    assert gap.max is not None
    assert gap.max < 2e-5
    assert gap.mean is not None
    assert gap.mean < 2e-6
    assert gap.p99 is not None
    assert gap.mean <= gap.p99 <= gap.max
    assert [(each.version, each.steps) for each in gap.versions] == [("0", 18), ("1", 18)]
    assert gap.steps == sum(len(t.steps) for t in trajectories) == 36
    assert gap.tokens == sum(len(s.response_ids) for t in trajectories for s in t.steps)
    assert dict(gap.not_compared) == {}
    assert [f for f in found.findings if f.severity != "note"] == []
    assert next(c for c in found.checks if c.check == "logprob_gap").status == "ok"


def test_a_checkpoint_knows_which_steps_it_sampled(trained: Any) -> None:
    folder, _ = trained
    gap = audit(folder, model=options(str(folder / "checkpoints/update-00000001/model"))).logprob_gap
    assert gap is not None
    assert gap.steps == 18
    assert dict(gap.not_compared) == {"weights of another version": 18}
    assert gap.max is not None
    assert gap.max < 2e-5


def test_the_weights_of_another_version_do_not_fit(trained: Any) -> None:
    folder, _ = trained
    wrong = options(str(folder / "checkpoints/update-00000001/model"), weights_version="0")
    found = audit(folder, model=wrong)
    assert found.logprob_gap is not None
    assert found.logprob_gap.mean is not None
    assert found.logprob_gap.mean > 0.01
    assert len(found.logprob_gap.worst) > 0
    first = found.logprob_gap.worst[0]
    assert abs(first.sampled - first.recomputed) == pytest.approx(found.logprob_gap.max)
    assert "⟦" in first.context


def test_a_planted_shift_of_logprobs_is_found(trained: Any, tmp_path: Path) -> None:
    folder, trajectories = trained
    step = trajectories[7].steps[1]
    logprobs = step.logprobs.copy()
    logprobs[2] -= 2.0
    steps = list(trajectories[7].steps)
    steps[1] = replace(step, logprobs=logprobs)
    planted = [*trajectories[:7], replace(trajectories[7], steps=tuple(steps)), *trajectories[8:]]
    (tmp_path / "checkpoints").symlink_to(folder / "checkpoints")
    (tmp_path / "renderer").symlink_to(folder / "renderer")
    found = audit(store(tmp_path, planted), model=options("auto"))
    (finding,) = [f for f in found.findings if f.severity == "error"]
    assert finding.check == "logprob_gap"
    assert (finding.trajectory, finding.step) == (str(trajectories[7].id), 1)
    assert finding.token == len(step.prompt_ids) + 2
    assert "⟦" in finding.context
    gap = found.logprob_gap
    assert gap is not None
    assert gap.max == pytest.approx(2.0, abs=1e-3)
    assert (gap.worst[0].trajectory, gap.worst[0].step, gap.worst[0].token) == (
        finding.trajectory,
        finding.step,
        finding.token,
    )


def test_what_cannot_be_compared_is_counted_with_the_reason(trained: Any, tmp_path: Path) -> None:
    folder, trajectories = trained
    first, second, third = trajectories[0].steps
    changed = (
        replace(first, logprobs=None),
        replace(second, sampling=replace(second.sampling, top_p=0.5)),
        replace(third, sampling=replace(third.sampling, logprobs_kind="raw")),
    )
    store(tmp_path, [replace(trajectories[0], steps=changed), *trajectories[1:6]])
    gap = audit(tmp_path, model=options(str(folder / "checkpoints/update-00000000/model"))).logprob_gap
    assert gap is not None
    assert gap.steps == 15
    assert dict(gap.not_compared) == {
        "no logprobs": 1,
        "truncated sampling or penalties": 1,
        "logprobs of another kind": 1,
    }


def test_percentiles_are_those_of_all_gaps(trained: Any, tmp_path: Path) -> None:
    """They come from a histogram, so that memory stays flat; it is fine enough."""
    folder, trajectories = trained
    rng = np.random.default_rng(0)
    noisy, expected = [], []
    for trajectory in trajectories[:6]:
        steps = []
        for step in trajectory.steps:
            noise = rng.exponential(0.01, len(step.logprobs))
            expected.append(noise)
            steps.append(replace(step, logprobs=step.logprobs - noise))
        noisy.append(replace(trajectory, steps=tuple(steps)))
    store(tmp_path, noisy)
    gap = audit(tmp_path, model=options(str(folder / "checkpoints/update-00000000/model"))).logprob_gap
    assert gap is not None
    every = np.concatenate(expected)
    assert gap.mean == pytest.approx(every.mean(), rel=1e-2)
    assert gap.bias == pytest.approx(-every.mean(), rel=1e-2)
    assert gap.p99 == pytest.approx(np.sort(every)[int(0.99 * len(every))], rel=0.05)


def test_a_model_that_could_be_any_version_is_asked_about(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    (tmp_path / "model").symlink_to(folder / "checkpoints/update-00000001/model")
    with pytest.raises(UserError, match="--weights-version"):
        audit(folder, model=options(str(tmp_path / "model")))
    with pytest.raises(UserError, match="'0', '1'"):
        audit(folder, model=options(str(tmp_path / "model"), weights_version="7"))


def test_a_run_without_checkpoints_says_so(trained: Any, tmp_path: Path) -> None:
    _, trajectories = trained
    with pytest.raises(UserError, match="no checkpoint"):
        audit(store(tmp_path, trajectories[:2]), model=options("auto"))


def test_a_model_that_is_not_there_is_one_line(trained: Any) -> None:
    folder, _ = trained
    with pytest.raises(UserError, match="there is no folder"):
        audit(folder, model=options("/no/such/model", weights_version="0"))
