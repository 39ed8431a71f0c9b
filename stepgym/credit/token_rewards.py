"""Credit by token: what an estimator with a critic is given and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepgym.errors import UserError
from stepgym.record.merge import find_chains
from stepgym.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TokenRewards:
    """The trained tokens of some trajectories, by trajectory, then step, then token. Observations are no part of it.

    Attributes:
        values: float64 array [M], the critic's value of the state that each token was sampled in.
        rewards: float64 array [M], the reward of each token.
        step: int64 array [M], number of each token's step; steps of one trajectory are numbered in their order.
        trajectory: int64 array [M], number of each token's trajectory.
    """

    values: NDArray[np.float64]
    rewards: NDArray[np.float64]
    step: NDArray[np.int64]
    trajectory: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len({len(self.values), len(self.rewards), len(self.step), len(self.trajectory)}) > 1:
            raise ValueError("values, rewards, step and trajectory differ in length")

    @classmethod
    def of(
        cls,
        values: NDArray[np.float64],
        step: NDArray[np.int64],
        step_rewards: Sequence[NDArray[np.float64]],
        kl: NDArray[np.float64] | None = None,
        coef: float = 0.0,
    ) -> TokenRewards:
        """Put each step's reward on its last trained token, and take the cost of the KL from every token.

        The reward of a step without a trained token goes to the last trained token of its trajectory before it, or
        else to the first after it; that of a trajectory without any goes nowhere.

        Args:
            values: The critic's values, [M].
            step: int64 [M], ascending: number of each token's step, counted over all steps of all trajectories.
            step_rewards: One array [steps] per trajectory, after treatment, in the order in which steps are numbered.
            kl: Estimate per token of log pi_old - log reference, [M], for the KL in the reward.
            coef: Its weight.
        """
        turns = [len(rewards) for rewards in step_rewards]
        trajectory_of = np.repeat(np.arange(len(turns)), turns)
        per_step = np.concatenate([np.zeros(0), *step_rewards])
        rewards = np.zeros(len(step)) if kl is None else -coef * np.asarray(kl, dtype=np.float64)
        trajectory = trajectory_of[step]
        last = np.searchsorted(step, np.arange(len(per_step)), side="right") - 1
        for number in np.flatnonzero(per_step):
            place = int(last[number])
            owner = trajectory_of[number]
            if place < 0 or trajectory[place] != owner:
                place += 1
            if place < len(step) and trajectory[place] == owner:
                rewards[place] += per_step[number]
        return cls(np.asarray(values, dtype=np.float64), rewards, step, trajectory)


@dataclass(frozen=True, slots=True, eq=False)
class TokenAdvantages:
    """What an estimator over tokens returns.

    Attributes:
        advantages: float64 array [M], the advantage of each token.
        returns: float64 array [M], what the critic's value of each token should have been.
    """

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


def assign_tokens(
    function: Callable[..., TokenAdvantages], batches: Sequence[TokenRewards], options: Mapping[str, Any]
) -> list[TokenAdvantages]:
    """Call an estimator over tokens once for all parts of a batch, and check what it returned.

    Args:
        function: An estimator declared with `@over_tokens`.
        batches: The mini-batches of a batch. Each numbers its own steps and trajectories.
        options: The estimator's keyword arguments.

    Returns:
        The advantages and returns of each mini-batch.

    Raises:
        ValueError: The estimator returned other shapes, or a number that is not finite.
    """
    sizes = [len(part.values) for part in batches]
    steps, trajectories, step, trajectory = 0, 0, [], []
    for part in batches:
        step.append(part.step + steps)
        trajectory.append(part.trajectory + trajectories)
        steps += int(part.step.max(initial=-1)) + 1
        trajectories += int(part.trajectory.max(initial=-1)) + 1
    none: NDArray[np.float64] = np.zeros(0)
    numbers: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    whole = TokenRewards(
        np.concatenate([none, *(part.values for part in batches)]),
        np.concatenate([none, *(part.rewards for part in batches)]),
        np.concatenate([numbers, *step]),
        np.concatenate([numbers, *trajectory]),
    )
    found = function(whole, **options)
    name = getattr(function, "__name__", repr(function))
    for kind, array in (("advantages", found.advantages), ("returns", found.returns)):
        if array.shape != whole.values.shape:
            raise ValueError(f"credit {name} returned {kind} of shape {array.shape} for {len(whole.values)} tokens")
        if not np.isfinite(array).all():
            raise ValueError(f"credit {name} returned {kind} that are not finite")
    cuts = np.cumsum(sizes)[:-1]
    parts = zip(np.split(found.advantages, cuts), np.split(found.returns, cuts), strict=True)
    return [TokenAdvantages(advantages, returns) for advantages, returns in parts][: len(batches)]


def require_chains(trajectories: Iterable[Trajectory], credit: str) -> None:
    """Refuse trajectories that are not one unbroken conversation, for a recursion over their tokens in step order.

    Raises:
        UserError: The first trajectory whose steps branch or overlap: a step does not extend, token for token, the
            step before it.
    """
    for trajectory in trajectories:
        # Without logprobs, so that a turn that lacks them is not taken for a break: the recursion does not use them.
        chains, reasons = find_chains([replace(step, logprobs=None) for step in trajectory.steps])
        if len(chains) > 1:
            why = ", ".join(reason.replace("_", " ") for reason in reasons) or "another conversation begins"
            raise UserError(
                f"trajectory {trajectory.id}, step {chains[1][0]}: credit {credit} runs over the tokens of one "
                f"unbroken sequence, and this step does not extend the one before it ({why}); use an outcome credit "
                "such as grpo, or turn_returns"
            )
