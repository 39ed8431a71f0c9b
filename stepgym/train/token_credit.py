"""Credit by token within a learner: values, advantages and returns of the trained tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stepgym.credit.token_rewards import TokenRewards, assign_tokens
from stepgym.errors import UserError
from stepgym.train.critic import Critic, explained_variance
from stepgym.train.mini_batch import MiniBatch


def assign_by_token(
    credit: Callable[..., Any],
    options: Mapping[str, Any],
    mini_batches: Sequence[MiniBatch],
    critic: Critic,
    kl: Sequence[torch.Tensor] | None = None,
    coef: float = 0.0,
) -> None:
    """Give every trained token of a batch its value, its advantage and its return. Collective.

    Args:
        credit: An estimator declared with `@over_tokens`.
        options: Its options.
        mini_batches: The mini-batches of the batch, which are filled in. Their advantages may depend on one another.
        critic: Gives the values.
        kl: The KL's estimate for each token, per mini-batch, where it is a part of the reward.
        coef: Its weight.

    Raises:
        UserError: The critic has diverged: a value is not finite.
    """
    parts = []
    for number, mini in enumerate(mini_batches):
        mini.values = critic.values(mini.micro_batches, len(mini))
        if not bool(mini.values.isfinite().all()):
            raise UserError(
                "the critic's values are not finite: it has diverged; go on from an earlier checkpoint with a lower "
                "algorithm.critic.optimizer.learning_rate"
            )
        rewards = [steps for signal in mini.signals for steps in signal.rewards.step_rewards]
        cost = None if kl is None else _array(kl[number])
        parts.append(TokenRewards.of(_array(mini.values), mini.batch.tokens.step, rewards, cost, coef))
    found = assign_tokens(credit, parts, options)
    for mini, given in zip(mini_batches, found, strict=True):
        assert mini.values is not None
        mini.advantage = torch.from_numpy(given.advantages).to(mini.values.device)
        mini.returns = torch.from_numpy(given.returns).to(mini.values.device)


class ValueMetrics:
    """What a critic knew before a batch, and how its updates went.

    Args:
        mini_batches: The batch, with values and returns; without them there is nothing to tell.
    """

    def __init__(self, mini_batches: Sequence[MiniBatch]) -> None:
        self._before: dict[str, float] = {}
        self._updates: list[Mapping[str, float]] = []
        values = [mini.values.double() for mini in mini_batches if mini.values is not None]
        returns = [mini.returns.double() for mini in mini_batches if mini.returns is not None]
        if not sum(map(len, values)):
            return
        said, right = torch.cat(values), torch.cat(returns)
        self._before = {"value_mean": float(said.mean()), "return_mean": float(right.mean())}
        explained = explained_variance(said, right)
        if explained is not None:
            self._before["explained_variance"] = explained

    def add(self, update: Mapping[str, float]) -> None:
        """Add what `Critic.update` returned."""
        self._updates.append(update)

    def means(self) -> dict[str, float]:
        """`value_mean`, `return_mean` and `explained_variance` over the trained tokens, before any update; means over
        the updates of what they returned."""
        names = self._updates[0] if self._updates else ()
        return self._before | {name: float(np.mean([update[name] for update in self._updates])) for name in names}


def _array(values: torch.Tensor) -> NDArray[np.float64]:
    return np.asarray(values.detach().double().cpu().numpy())
