"""Group in group policy optimisation: trajectories compared by reward, and steps by what came of the same state."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from stepgym.credit.group import EPSILON, Advantages, GroupRewards
from stepgym.credit.grpo import grpo
from stepgym.credit.returns import discounted
from stepgym.record.step import Step


def gigpo(
    group: GroupRewards,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    step_weight: Annotated[float, Field(ge=0)] = 1.0,
    state: Literal["prompt", "observation"] = "prompt",
    scale_by_std: bool = True,
) -> Advantages:
    """Turn-level credit, A_it = E_i + step_weight * S_it.

    E_i = (r_i - mean(r)) / (std(r) + 1e-6) compares trajectories, as GRPO does. S_it = (G_it - mean(G)) / (std(G) +
    1e-6) compares steps: the return G_it = sum over k >= t of gamma^(k-t) r_ik against the returns of all steps of the
    group that started from the same state (the paper's anchor state). Standard deviations have ddof = 1. A state that
    was met only once gives S = 0; a group of one gets 0.

    Source: Feng et al. 2025, Group-in-group policy optimization for LLM agent training (arXiv:2505.10978), section 4;
    gamma = 0.95 and the weight (omega) 1 are the paper's.

    Args:
        group: The rewards and the steps of one group.
        gamma: Discount per turn.
        step_weight: Weight of S. 0 is GRPO.
        state: What makes two states the same. `prompt`: the model was shown the same token ids, so the whole history
            agrees. `observation`: the same messages came in, whatever came before; for environments whose observation
            says all about where the agent is (the paper's are such).
        scale_by_std: Divide by the standard deviations; False is the paper's variant with a normalisation of 1.

    Raises:
        ValueError: The group came without its steps.
    """
    count = len(group.rewards)
    if count < 2:
        return group.over_steps(np.zeros(count))
    if group.steps is None:
        raise ValueError("gigpo compares the states of steps, and the group came without its steps")
    by_state: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for member, steps in enumerate(group.steps):
        for turn, step in enumerate(steps):
            by_state[_prompt(step) if state == "prompt" else _observation(step)].append((member, turn))
    returns = [discounted(rewards, gamma) for rewards in group.step_rewards]
    advantages = grpo(group, scale_by_std=scale_by_std)
    for places in by_state.values():
        if len(places) > 1:
            values = np.array([returns[member][turn] for member, turn in places])
            for (member, turn), value in zip(places, _standardised(values, scale_by_std), strict=True):
                advantages[member][turn] += step_weight * value
    return advantages


def _standardised(values: NDArray[np.float64], scale_by_std: bool) -> NDArray[np.float64]:
    centred: NDArray[np.float64] = values - values.mean()
    return centred / (values.std(ddof=1) + EPSILON) if scale_by_std else centred


def _prompt(step: Step) -> Hashable:
    if step.prompt_ids is None:
        raise ValueError("gigpo compares prompts, and a step has no token ids")
    return hashlib.blake2b(step.prompt_ids.tobytes(), digest_size=16).digest()


def _observation(step: Step) -> Hashable:
    # Ids of tool calls are made up anew for every sample, and what the agent itself said is no observation.
    seen: Sequence[object] = [
        [message.get("role"), message.get("name"), message.get("content")]
        for message in step.new_messages
        if message.get("role") != "assistant"
    ]
    return json.dumps(seen, sort_keys=True, default=str)
