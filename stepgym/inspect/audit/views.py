"""What the functions of checks look at: a step in its conversation, a trajectory, a group, the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from stepgym.errors import UserError
from stepgym.inspect.audit.rendering import Rendering
from stepgym.model.prompt import OPEN_TURN
from stepgym.record.delta import common_prefix
from stepgym.record.outcome import Outcome
from stepgym.record.step import Ids, Step
from stepgym.record.trajectory import Trajectory, TrajectoryId

TRAINED_PHASE = "train"
"""Episodes of this phase become gradients; of all others they do not."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known about the run besides its trajectories.

    Attributes:
        config: Its resolved config; empty for a bare folder of shards.
        metrics: Rows of `metrics.jsonl`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; empty where it has none."""
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}


class Limits(NamedTuple):
    """Lengths in tokens; None where there is no limit, or none is known."""

    prompt: int | None
    response: int | None
    context: int | None


class TrajectoryView:
    """A trajectory, with its conversations put together again.

    Attributes:
        trajectory: The record.
        facts: What is known about the run.
        rendering: How its messages are rendered; None without a tokenizer.
        steps: One view for each step.
    """

    def __init__(self, trajectory: Trajectory, facts: RunFacts, rendering: Rendering | None) -> None:
        self.trajectory = trajectory
        self.facts = facts
        self.rendering = rendering
        self.steps = [StepView(self, index, step) for index, step in enumerate(trajectory.steps)]

    @property
    def trained(self) -> bool:
        """Whether its phase is the one that is trained on."""
        return self.trajectory.id.phase == TRAINED_PHASE

    @cached_property
    def limits(self) -> Limits:
        """The limits it was played under: those it recorded, else the run's config's."""
        recorded = self.trajectory.provenance.get("limits")
        if isinstance(recorded, Mapping):
            prompt, response = (_whole(recorded.get(name)) for name in _LIMITS)
            return Limits(prompt, response, _whole(recorded.get("context_length")))
        rollout = self.facts.section("rollout")
        prompt, response = (_whole(rollout.get(name)) for name in _LIMITS)
        return Limits(prompt, response, None)

    @cached_property
    def tools_changed(self) -> bool:
        """Whether a conversation went on with other tools; which ones is not recorded."""
        return any(view.step.rendering == "tools_changed" for view in self.steps)

    @cached_property
    def followed(self) -> list[list[int]]:
        """For each step, the steps that follow it."""
        found: list[list[int]] = [[] for _ in self.steps]
        for view in self.steps:
            if view.parent is not None:
                found[view.parent.index].append(view.index)
        return found


class StepView:
    """A step and what stands around it. Everything is worked out when it is first asked for."""

    def __init__(self, owner: TrajectoryView, index: int, step: Step) -> None:
        self.owner = owner
        self.index = index
        self.step = step
        self.reading: tuple[Mapping[str, Any], bool] | None = None
        self.begins: tuple[str, bool] | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory it belongs to."""
        return self.owner.trajectory

    @property
    def rendering(self) -> Rendering:
        """How messages are rendered. Only for checks that need a tokenizer."""
        assert self.owner.rendering is not None
        return self.owner.rendering

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools on offer."""
        return self.owner.trajectory.tools

    @property
    def has_ids(self) -> bool:
        """Whether it has token ids: those from engines that speak only chat have none."""
        return self.step.prompt_ids is not None

    @property
    def prompt_ids(self) -> Ids:
        """int32 [P]. Only where there are ids."""
        assert self.step.prompt_ids is not None
        return self.step.prompt_ids

    @property
    def response_ids(self) -> Ids:
        """int32 [R]. Only where there are ids."""
        assert self.step.response_ids is not None
        return self.step.response_ids

    @cached_property
    def parent(self) -> StepView | None:
        """The step whose conversation this one goes on with; None where there is none, or none that is possible."""
        follows = self.step.follows
        return self.owner.steps[follows] if follows is not None and 0 <= follows < self.index else None

    @cached_property
    def messages(self) -> list[Mapping[str, Any]] | None:
        """The whole conversation that the prompt was made of; None where the record does not say."""
        if self.step.follows is None:
            return list(self.step.new_messages) or None
        before = self.parent.messages if self.parent is not None else None
        said = self.parent.step.message if self.parent is not None else None
        if before is None or said is None:
            return None
        return [*before, said, *self.step.new_messages]

    @cached_property
    def shared(self) -> int:
        """Number of leading tokens of the prompt that are those of the parent's prompt + response."""
        if self.parent is None or not self.parent.has_ids:
            return 0
        return common_prefix(self.parent.full_ids, self.prompt_ids)

    @cached_property
    def extends(self) -> bool:
        """Whether the prompt begins with the parent's whole prompt + response."""
        return self.parent is not None and self.parent.has_ids and self.shared == self.parent.step.length

    @property
    def in_open_turn(self) -> bool:
        """Whether its prompt is said to go on inside an open assistant turn (`turns: continue`)."""
        return self.step.rendering in OPEN_TURN

    @property
    def kept(self) -> int:
        """How many tokens of the parent's prompt + response a prompt that goes on with it begins with: all of them, but
        for the end of a turn that was reopened.
        """
        length = self.parent.step.length if self.parent is not None else 0
        return max(0, length - (self.step.rendering == "turn_reopened"))

    @cached_property
    def full_ids(self) -> Ids:
        """int32 [P + R]."""
        return self.step.full_ids

    @cached_property
    def ended_by(self) -> int | None:
        """The stop token that the response ends in; None where it ends in none."""
        if not len(self.response_ids):
            return None
        last = int(self.response_ids[-1])
        return last if last in self.rendering.stop_ids else None

    @property
    def asked(self) -> int | None:
        """Most tokens that the response was asked for; None where that is not known."""
        known = [most for most in (self.step.max_tokens, self.owner.limits.response) if most is not None]
        return min(known, default=None)

    @property
    def end_is_one_too_many(self) -> bool:
        """Whether the response has one token more than was asked for, and that is the end of the turn."""
        return self.asked is not None and len(self.response_ids) == self.asked + 1 and self.ended_by is not None

    @cached_property
    def spoken(self) -> str:
        """The response as text, without the stop token it ends in."""
        ids = self.response_ids
        return self.rendering.decode(ids[:-1] if self.ended_by is not None else ids)

    @cached_property
    def stopped_at(self) -> int | None:
        """Where in `spoken` the first stop string ends; None where there is none."""
        ends = [at + len(stop) for stop in self.step.stop if stop and (at := self.spoken.find(stop)) >= 0]
        return min(ends) if ends else None

    @cached_property
    def template_text(self) -> str:
        """What the template makes of the conversation, from scratch. Raises `UserError` where it refuses it."""
        messages = self.messages
        if messages is None:
            raise UserError("the messages of the conversation are not recorded")
        return self.rendering.text(messages, self.tools)

    @cached_property
    def generation_prompt(self) -> str | None:
        """What the template adds for sampling; None where it refuses the conversation, or it is not recorded.

        Inside an open turn it is what that turn was opened with: the template is not asked again.
        """
        opening = self
        while opening.in_open_turn and opening.parent is not None:
            opening = opening.parent
        if opening is not self:
            return opening.generation_prompt
        if self.messages is None:
            return None
        try:
            return self.rendering.generation_prompt(self.messages, self.tools)
        except UserError:
            return None  # `prompt_drift` says that the template refuses the conversation


class Said(NamedTuple):
    """All responses of a trajectory that was sampled untruncated: their digest, and the sum of their logprobs."""

    digest: int
    logprob: float


class Member(NamedTuple):
    """What is kept of every trajectory, for the checks that look at more than one.

    Attributes:
        id: The trajectory's id.
        final, outcome, reward, success: As recorded.
        steps: Number of steps.
        env_seed, sampler_seed: None where not recorded.
        task: Digest of the task.
        opening: Digest of the environment's first messages; None where the agent may have changed them.
        said: What was sampled; None where that cannot be compared.
        versions: For each weights version: its name, how many tokens it sampled, and the step and the position in
            prompt + response of the first.
    """

    id: TrajectoryId
    final: bool
    outcome: Outcome
    reward: float | None
    success: bool | None
    steps: int
    env_seed: int | None
    sampler_seed: int | None
    task: int
    opening: int | None
    said: Said | None
    versions: tuple[tuple[str, int, int, int], ...]


class GroupView(NamedTuple):
    """All trajectories of one task in one batch.

    Attributes:
        name: `phase/iteration/task`.
        members: Every attempt that is stored, in the order of samples and attempts.
        expected: Number of samples that there should be; None where it is not known.
        facts: What is known about the run.
        unread: Samples whose rows could not be read; other checks say so.
    """

    name: str
    members: Sequence[Member]
    expected: int | None
    facts: RunFacts
    unread: frozenset[int] = frozenset()

    @property
    def standing(self) -> list[Member]:
        """The attempts that stand and could be scored: what a baseline is made of."""
        return [m for m in self.members if m.final and m.outcome.scored and m.reward is not None]

    @property
    def flat(self) -> bool:
        """Whether two or more members stand and all have the same reward, so that none has an advantage."""
        rewards = [m.reward for m in self.standing if m.reward is not None]
        return len(rewards) > 1 and max(rewards) - min(rewards) <= 1e-6


_LIMITS = ("max_prompt_tokens", "max_response_tokens")


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
