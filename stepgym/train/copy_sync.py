"""The engine in this process on a copy of the model, so that it samples while the model is trained or sharded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from stepgym.env.worker import threads
from stepgym.errors import UserError
from stepgym.model.placement import place
from stepgym.train.recipe import Recipe
from stepgym.train.sync import Gathered, Progress, WeightSync
from stepgym.train.weights import gathered, whole_tensors

if TYPE_CHECKING:
    from stepgym.train.policy import Policy

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CopySync(WeightSync):
    """An engine over a copy of the model that is trained, in the type that the policy computes in.

    Weights are copied between two forward passes of the engine, all of them, an adapter merged into them. A response
    that is being sampled goes on under the new weights: the keys and values of what it has are computed again, so every
    log-probability is that of the weights that its span names.

    The copy takes as much memory as the weights. `engine.device` may be another GPU than the policy's.
    """

    overlaps = True
    gathers = True
    without: ClassVar[Mapping[str, str]] = {
        "revision": "in training the engine runs a copy of the policy's own model; see `model`"
    }

    @classmethod
    def before_policy(cls, model: Any) -> Any:
        """A copy of the model as it was loaded."""
        return copy.deepcopy(model)

    @classmethod
    def gather(cls, recipe: Recipe, policy: Policy, *, start: bool = False) -> Gathered:
        """All weights, an adapter merged; see `WeightSync.gather`. The engine needs none at the start."""
        if policy.processes.size == 1 or start:
            return None
        return gathered(whole_tensors(policy.model, policy.adapter), keep=policy.processes.is_lead)

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        tokenizer: Any,
        folder: Path,
        *,
        plain: Any = None,
        weights: Gathered = None,
    ) -> None:
        from stepgym.model.engines.transformers import TransformersEngine

        fields = self.check(recipe)
        name = fields.pop("model")
        device = _device(fields.pop("device", "auto"), policy.device)
        dtype = _TYPES.get(fields.pop("dtype", "auto"), policy.compute_dtype)
        if plain is None:
            raise ValueError("CopySync needs what before_policy returned")
        self._model = place(plain, device, dtype).requires_grad_(False).eval()
        self._policy = policy
        self._version: str | None = None
        self._engine = TransformersEngine.wrap(self._model, tokenizer, name=name, **fields)
        self.engine = self._engine

    async def start(self) -> None:
        """Open the engine: it takes no time, and a setting that does not fit the model shows at once."""
        await self._engine.open()

    async def open(self, progress: Progress | None = None) -> None:
        """Open the engine where `start` has not."""
        await self._engine.open()

    async def publish(self, version: str, weights: Gathered = None) -> None:
        """Copy the policy's weights into the engine's model; see `WeightSync.publish`."""
        if version != self._version:
            await threads.run(self._take, version, weights)
            self._version = version

    def _take(self, version: str, weights: Gathered) -> None:
        tensors = whole_tensors(self._policy.model, self._policy.adapter) if weights is None else weights.items()
        own = self._model.state_dict()
        with self._engine.paused(), torch.no_grad():
            for name, tensor in tensors:
                own[name].copy_(tensor)
            self._engine.weights_version = version


def _device(name: str, policys: torch.device) -> torch.device:
    """The engine's device. Raises `UserError` for one that is not there."""
    if name == "auto":
        return policys
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"engine.device: {name!r} cannot be used: {reason}") from None
    return device
