"""Clean episodes of two games, a way to store them with a fault planted, and a way to audit what was stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from colours import Colours
from guess import Guess

from stepgym.inspect.audit import Audit, Finding, audit
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.renderer_files import save_renderer
from stepgym.record.step import Ids, Sampling, Step
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.rollouts import RolloutConfig, rollout


class Actor(Engine):
    """Says for the n-th turn of a conversation what `say(n)` gives, with logprobs, as weights of version 3."""

    kind = "actor"
    model = "actor"

    def __init__(self, tokenizer: Any, opener: str, say: Callable[[int], str]) -> None:
        self._tokenizer, self._opener, self._say = tokenizer, opener, say

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        turn = self._tokenizer.decode(prompt_ids).count(self._opener)
        text = self._say(turn)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not text.endswith(tuple(stop) or "\0"):
            ids = [*ids, self._tokenizer.eos_token_id]
        logprobs = -0.1 - np.arange(len(ids)) / 100
        return Completion(np.asarray(ids), logprobs, "stop", (("3", 0, len(ids)),))


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


def play(family_name: str, env: Any, say: Callable[[int], str], tasks: int = 3) -> tuple[list[Trajectory], Renderer]:
    family = families.FAMILIES[family_name]
    tokenizer = families.tokenizer_for(family)
    renderer = Renderer(tokenizer)
    found = rollout(
        env,
        env().tasks("train")[:tasks],
        Actor(tokenizer, family.generation_prompt, say),
        renderer=renderer,
        config=RolloutConfig(samples=2, max_prompt_tokens=400, max_response_tokens=60),
        phase="train",
        iteration=1,
    )
    return found, renderer


class Bench:
    """Clean trajectories, a place to put them with a fault, and the audit of it.

    Attributes:
        clean: The trajectories as they were recorded: three tasks, two samples each.
        renderer: What rendered them.
    """

    def __init__(self, clean: list[Trajectory], renderer: Renderer, folder: Path) -> None:
        self.clean, self.renderer, self.folder = clean, renderer, folder

    def step(self, trajectory: int, step: int, **changes: Any) -> list[Trajectory]:
        """The clean trajectories, with one step of one of them changed."""
        steps = list(self.clean[trajectory].steps)
        steps[step] = replace(steps[step], **changes)
        return self.trajectory(trajectory, steps=tuple(steps))

    def trajectory(self, trajectory: int, **changes: Any) -> list[Trajectory]:
        """The clean trajectories, with one of them changed."""
        found = list(self.clean)
        found[trajectory] = replace(found[trajectory], **changes)
        return found

    def store(self, trajectories: Sequence[Trajectory], *, renderer: bool = True) -> Path:
        if renderer:
            save_renderer(self.renderer, self.folder / "renderer")
        with TrajectoryStore(self.folder / "trajectories", "a") as store:
            for trajectory in trajectories:
                store.append(trajectory)
        return self.folder

    def audit(self, trajectories: Sequence[Trajectory], *, renderer: bool = True, **options: Any) -> Audit:
        return audit(self.store(trajectories, renderer=renderer), **options)

    def only(self, trajectories: Sequence[Trajectory], **options: Any) -> Finding:
        """The one error or warning that an audit finds."""
        found = [f for f in self.audit(trajectories, **options).findings if f.severity != "note"]
        assert len(found) == 1, found
        return found[0]


def with_response(step: Step, ids: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Changes that give a step another response: all of it trained, all of it sampled by the same weights."""
    count = len(ids)
    assert step.logprobs is not None
    logprobs = np.resize(step.logprobs, count)
    return {
        "response_ids": list(ids),
        "loss_mask": np.ones(count),
        "logprobs": logprobs,
        "weights_versions": (("3", 0, count),),
        **changes,
    }


@pytest.fixture(scope="session")
def played() -> dict[str, tuple[list[Trajectory], Renderer]]:
    return {
        "colours": play("chatml", Colours, lambda turn: "<say>open</say>" if turn == 1 else "<say>white</say>"),
        "guess": play("tools_json", Guess, lambda turn: call(turn) if turn < 3 else "It is 2."),
        "dated": play("dated", Colours, lambda turn: "<say>open</say>" if turn == 1 else "<say>white</say>"),
    }


@pytest.fixture
def colours(played: Any, tmp_path: Path) -> Bench:
    """Turns that end at a stop string; the second of two turns is rewarded where the colour is white."""
    return Bench(*played["colours"], tmp_path)


@pytest.fixture
def guess(played: Any, tmp_path: Path) -> Bench:
    """Two tool calls and a last word, each ended by the turn's terminator."""
    return Bench(*played["guess"], tmp_path)


@pytest.fixture
def dated(played: Any, tmp_path: Path) -> Bench:
    """As `colours`, under a template with the date in it."""
    return Bench(*played["dated"], tmp_path)
