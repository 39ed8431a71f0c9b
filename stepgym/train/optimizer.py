"""AdamW with a learning rate that warms up and decays, shared by reinforcement learning and supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stepgym.errors import UserError

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(BaseModel):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), gradient clipping and the learning-rate schedule.

    Attributes:
        learning_rate: The highest learning rate.
        warmup_updates: Updates over which the learning rate rises linearly; the first update already moves.
        warmup_ratio: The same as a share of all updates; give one of the two.
        decay: `constant`, or `linear` or `cosine` down to `final_learning_rate` at the last update.
        final_learning_rate: Where the decay ends.
        betas: Decay of AdamW's averages of the gradient and of its square.
        eps: Added to AdamW's denominator.
        weight_decay: Decoupled weight decay of matrices and embeddings; vectors (norms, biases) are not decayed.
        max_grad_norm: Gradients are scaled down to this norm; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_updates: int = Field(default=0, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_learning_rate: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _schedule(self) -> OptimizerConfig:
        if self.warmup_updates and self.warmup_ratio is not None:
            raise ValueError("'warmup_updates' and 'warmup_ratio' exclude each other")
        if self.decay == "constant" and self.final_learning_rate:
            raise ValueError("'final_learning_rate' has no effect with decay 'constant'; use linear or cosine")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(f"'final_learning_rate' is over 'learning_rate', {self.learning_rate:g}: a decay falls")
        return self

    def warmup(self, total_updates: int | None) -> int:
        """Updates over which the learning rate rises. Raises `UserError` for a share of an unknown number."""
        if self.warmup_ratio is None:
            return self.warmup_updates
        if total_updates is None:
            raise UserError("warmup_ratio needs total_updates, the number of updates it is a share of")
        return round(self.warmup_ratio * total_updates)

    def learning_rate_at(self, update: int, total_updates: int | None = None) -> float:
        """Learning rate of update number `update` (from 0) of `total_updates`.

        Past the last update of a decay the rate stays where the decay ended.

        Raises:
            UserError: The rate decays, or warms up over a share of the updates, and `total_updates` is None.
        """
        warmup = self.warmup(total_updates)
        if update < warmup:
            return self.learning_rate * (update + 1) / (warmup + 1)
        if self.decay == "constant":
            return self.learning_rate
        if total_updates is None:
            raise UserError(f"decay {self.decay!r} needs total_updates, the number of updates it ends after")
        progress = (update - warmup) / max(1, total_updates - 1 - warmup)
        progress = min(1.0, progress)
        share = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_learning_rate + share * (self.learning_rate - self.final_learning_rate)


class Optimizer:
    """AdamW over a model's parameters, the clipping and the schedule. Counts the updates it makes.

    Parameters may be sharded (DTensors): each rank holds the averages of its shards, and the norm that gradients are
    clipped to is that over all ranks.

    Args:
        parameters: What is trained, with names (as of `named_parameters`) or without; those that require no gradient
            are left out. Names are what `state_dict` goes by; without them numbers are.
        config: See `OptimizerConfig`.
        total_updates: The number of updates the schedule is laid out for; None where it does not decay.

    Attributes:
        updates: Updates made so far. An update whose gradient was not finite is not made.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        total_updates: int | None = None,
    ) -> None:
        config.learning_rate_at(config.warmup(total_updates), total_updates)  # refuse a schedule without an end now
        self.config = config
        self.total_updates = total_updates
        self.updates = 0
        given = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(parameters)]
        self._named = {name: parameter for name, parameter in given if parameter.requires_grad}
        self._parameters = list(self._named.values())
        decayed = [parameter for parameter in self._parameters if parameter.ndim > 1]
        plain = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.config.learning_rate_at(self.updates, self.total_updates)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip, take one step and forget the gradients. Collective where parameters are sharded.

        Returns the norm of the gradient before clipping. Where it is not finite no step is taken.
        """
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        norm = clip_gradients(self._parameters, limit)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self.updates += 1
        self.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on besides the weights. Tensors and plain values only.

        The tensors are the live ones, sharded as the parameters are: copy them to keep them, copy into them to change
        them. Hyperparameters are not among them: they are the config's.
        """
        state = {}
        for name, parameter in self._named.items():
            own = self._adamw.state[parameter]
            if not own:  # as AdamW begins; a parameter that never had a gradient has nothing yet
                own["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                own["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                own["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state[name] = {key: own[key].detach() for key in ("step", "exp_avg", "exp_avg_sq")}
        return {"adamw": state, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was called; the values are copied. The schedule stays this optimizer's own.

        Raises:
            ValueError: It is the state of other parameters.
        """
        own, given = self.state_dict()["adamw"], state["adamw"]
        if odd := set(own) ^ set(given):
            raise ValueError(f"the state is that of other parameters: {min(odd)}")
        for name, parts in own.items():
            for key, tensor in parts.items():
                if tensor.shape != given[name][key].shape:
                    theirs, ours = list(given[name][key].shape), list(tensor.shape)
                    raise ValueError(f"{key} of {name} is {theirs} in the state and {ours} here")
        for name, parts in own.items():
            for key, tensor in parts.items():
                if tensor is not given[name][key]:
                    tensor.copy_(given[name][key])
        self.updates = int(state["updates"])


def clip_gradients(parameters: Iterable[torch.Tensor], limit: float) -> float:
    """Scale gradients down, in place, so that their norm over all parameters and ranks is `limit` at most.

    The 2-norm of all gradients as one vector (Pascanu et al. 2013, arXiv:1211.5063). Parameters may be sharded, plain
    (the same on every rank), or some of each. Collective where any is sharded.

    Returns:
        The norm before; 0 where there is no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    kinds = [[p for p in trained if _is_sharded(p) is sharded] for sharded in (False, True)]
    norms = []
    for members in kinds:
        if members:
            norm: Any = torch.nn.utils.get_total_norm([p.grad for p in members if p.grad is not None])
            norms.append(norm.full_tensor() if _is_sharded(norm) else norm)
    if not norms:
        return 0.0
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for members in kinds:
        if members:
            torch.nn.utils.clip_grads_with_norm_(members, limit, total)
    return float(total)


def _is_sharded(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
