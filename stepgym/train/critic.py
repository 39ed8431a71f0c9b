"""The critic: predicts, for every trained token, the rewards still to come when it was sampled."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stepgym.errors import UserError
from stepgym.model.progress_bars import quiet_transformers
from stepgym.train.compile import compile_layers
from stepgym.train.critic_config import CriticConfig
from stepgym.train.forward_module import decoder_layers, find_attention
from stepgym.train.lora import Adapter
from stepgym.train.mini_batch import MiniBatch
from stepgym.train.optimizer import Optimizer
from stepgym.train.packs.micro_batch import MicroBatch
from stepgym.train.parallel.sharding import reduce_gradients, shard
from stepgym.train.policy import Policy, disable_dropout, set_training
from stepgym.train.value_module import ValueModule
from stepgym.train.weights import whole

logger = logging.getLogger(__name__)


class Critic:
    """A value for every trained token, over the same micro-batches as the policy, and the updates that teach it.

    It has weights of its own: a copy of the policy's as they are now, or another model's, and a new head of one number.
    Under LoRA its model is frozen too, and it trains an adapter of the same shape, which begins as the policy's.

    Args:
        policy: Whose micro-batches it computes; it takes over device, types, kernels and processes. Collective.
        config: See `CriticConfig`.
        total_updates: Number of updates that the schedule is laid out for.
        seed: Seeds a new adapter.

    Attributes:
        module: The model and the value head.
        optimizer: AdamW over both.

    Raises:
        UserError: The model at `config.path` cannot be loaded, has another vocabulary, or cannot compute forests where
            the policy does.
    """

    def __init__(
        self, policy: Policy, config: CriticConfig, total_updates: int | None = None, *, seed: int = 0
    ) -> None:
        self.config = config
        self._policy = policy
        model = _copy(policy) if config.path is None else _load(config.path, policy)
        model = model.to(device=policy.device)
        model.requires_grad_(True)
        disable_dropout(model)
        lora = policy.config.lora
        if lora is not None:
            # What the returns are compared with must not change from one pass to the next.
            Adapter(model, lora.model_copy(update={"dropout": 0.0}), seed=seed)
            if config.path is None:
                _copy_adapter(policy, model)
        model.eval()
        if policy.config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module = ValueModule(model, find_attention(policy.config.attention, policy.device))
        if policy.forward_module.branches and not self.module.branches:
            raise UserError(
                f"algorithm.critic.path: {self.module.branches_not}, and the policy trains on forests; "
                "use another model"
            )
        wide = policy.compute_dtype
        shard(
            self.module,
            decoder_layers(model),
            policy.processes,
            compute_dtype=wide if wide != model.dtype else None,
        )
        if policy.compiles:
            compile_layers(decoder_layers(model))
        self.optimizer = Optimizer(self.module.named_parameters(), config.optimizer, total_updates)

    def warms_up(self, batches: int) -> bool:
        """Whether only the critic learns from the next batch, when there were `batches` before it."""
        return batches < self.config.warmup_batches

    @torch.no_grad()
    def values(self, micro_batches: Sequence[MicroBatch], count: int) -> torch.Tensor:
        """Tensor [count] on the policy's device: the value of each trained token of a mini-batch, no gradient.

        Of the whole mini-batch, also where this rank computes only a share of it. Collective.

        Args:
            micro_batches: This rank's share of the mini-batch.
            count: Trained tokens of the whole.
        """
        device = self._policy.device
        result = torch.zeros(count, device=device)
        for index, micro_batch in enumerate(micro_batches):
            values = self._compute(micro_batch)
            if not index:
                result = result.to(values.dtype)
            result[micro_batch.token.to(device)] = values
        return self._policy.processes.sum(result)

    def update(self, mini: MiniBatch) -> dict[str, float]:
        """One update towards the returns of a mini-batch. Collective.

        Returns:
            What `backward` returns, and `critic_grad_norm` (before clipping). An update whose norm is not finite is not
            made.
        """
        measured = self.backward(mini)
        norm = self.optimizer.step()
        if not math.isfinite(norm):
            logger.warning("update of the critic skipped: the gradient's norm is %s", norm)
        return measured | {"critic_grad_norm": norm}

    def backward(self, mini: MiniBatch) -> dict[str, float]:
        """Add the gradient of a mini-batch's loss, the mean over its trained tokens of

            1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2),

        where R is the return and V_old the value before the batch's first update. Collective.

        Source: Schulman et al. 2017 (arXiv:1707.06347) and its published code; Huang et al. 2024 (arXiv:2403.17031).

        Returns:
            `value_loss`, and `value_clip_fraction`: tokens whose value had moved too far to be pulled on.
        """
        assert mini.values is not None
        assert mini.returns is not None
        count, processes, device = len(mini), self._policy.processes, self._policy.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        with self._training():
            for number, micro_batch in enumerate(mini.micro_batches, start=1):
                # Gradients are summed over the ranks once, with the last micro-batch.
                reduce_gradients(self.module, number == len(mini.micro_batches))
                chosen = micro_batch.token.to(device)
                values = self._compute(micro_batch)
                before, returns = (known[chosen].to(values.dtype) for known in (mini.values, mini.returns))
                losses, clipped = value_loss(values, before, returns, self.config.clip)
                # Sharding averages gradients over the ranks, and the loss is a sum over what all of them hold.
                (losses.sum() * (processes.size / count)).backward()  # type: ignore[no-untyped-call]
                sums += torch.stack([losses.detach().double().sum(), clipped.double().sum()])
        loss, clip_fraction = (processes.sum(sums) / count).tolist()
        return {"value_loss": loss, "value_clip_fraction": clip_fraction}

    def state_dict(self) -> dict[str, Any]:
        """Everything that its next update depends on: the live tensors of what is trained, perhaps sharded."""
        weights = {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was called; the values are copied.

        Raises:
            ValueError: It is the state of another model.
        """
        own, given = self.state_dict()["weights"], state["weights"]
        if odd := set(own) ^ set(given):
            raise ValueError(f"the critic's state is that of another model: {min(odd)}")
        for name, tensor in own.items():
            if tensor.shape != given[name].shape:
                theirs, ours = list(given[name].shape), list(tensor.shape)
                raise ValueError(f"the critic's {name} is {theirs} in the state and {ours} here")
        for name, tensor in own.items():
            tensor.copy_(given[name])  # into itself, where it was read in place
        self.optimizer.load_state_dict(state["optimizer"])

    def _compute(self, micro_batch: MicroBatch) -> torch.Tensor:
        policy = self._policy
        autocasts = policy.compute_dtype != self.module.model.dtype
        with torch.autocast(policy.device.type, dtype=policy.compute_dtype, enabled=autocasts):
            values: torch.Tensor = self.module(micro_batch)
        return values

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Gradient checkpointing is on within, where it is asked for."""
        set_training(self.module, True)
        try:
            yield
        finally:
            set_training(self.module, False)


def value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped squared error of each value; see `Critic.backward`.

    Args:
        values: Tensor [M] with gradient.
        before: Tensor [M], the values before the batch's first update.
        returns: Tensor [M].
        clip: How far a value may move; None for no limit.

    Returns:
        The losses [M], and bool [M]: where the clipped value decides, so that nothing pulls.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(values, dtype=torch.bool)
    held = (before + torch.clamp(values - before, -clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, held), (held > plain).detach()


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that says the mean, less for worse.

    None where all returns are equal, or there are none.
    """
    if len(returns) < 2:
        return None
    variance = returns.double().var()
    if not variance > 0:
        return None
    return float(1 - (returns.double() - values.double()).var() / variance)


@torch.no_grad()
def _copy(policy: Policy) -> Any:
    """A model with the policy's weights as they are now, whole; without its adapter."""
    from transformers.initialization import no_init_weights

    model = policy.model
    with no_init_weights(), quiet_transformers():
        twin = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    weights = {
        name.replace(".base_layer.", "."): whole(tensor)
        for name, tensor in model.state_dict().items()
        if not _in_adapter(name)
    }
    twin.load_state_dict(weights)
    return twin


@torch.no_grad()
def _copy_adapter(policy: Policy, model: Any) -> None:
    """Give a model's adapter the weights of the policy's."""
    own = dict(model.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if _in_adapter(name):
            own[name].copy_(whole(parameter))


def _in_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _load(path: str, policy: Policy) -> Any:
    from transformers import AutoModelForCausalLM

    where = f"algorithm.critic.path: model {path!r}"
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=policy.model.dtype)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{where} cannot be loaded: {reason}") from error
    ours, theirs = (m.config.get_text_config().vocab_size for m in (policy.model, model))
    if ours != theirs:
        raise UserError(f"{where} has a vocabulary of {theirs} tokens, and the policy one of {ours}; they must agree")
    return model
