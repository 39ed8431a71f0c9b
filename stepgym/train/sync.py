"""How new weights reach the engine that samples from them. `SYNCS` finds the way for a kind of engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from stepgym.errors import UserError
from stepgym.model.engines.base import Engine
from stepgym.plugins import Registry
from stepgym.train.policy import Policy
from stepgym.train.recipe import Recipe, engine_fields

Progress = Callable[[str], None]
"""Told what is being waited for, in a line that replaces the one before; from any thread."""


class WeightSync(ABC):
    """An engine, and the way from the policy that is trained to it.

    The order of calls is `start`, `open`, then for each update `before_update`, `after_update`, `publish`; and `close`.
    Between `open` and `close` the engine samples, but not between `before_update` and `publish`.

    Args:
        recipe: Where the engine's fields are.
        policy: The model that is trained.
        tokenizer: Its tokenizer.
        folder: A folder for the engine's logs.

    Attributes:
        engine: The engine. It samples from the weights that were published last.
        waits_for: What `open` waits for, in a word, where that takes long; else empty.
    """

    engine: Engine
    waits_for: ClassVar[str] = ""
    without: ClassVar[Mapping[str, str]] = {}
    """Fields of the engine that make no sense in training, and why."""

    @abstractmethod
    def __init__(self, recipe: Recipe, policy: Policy, tokenizer: Any, folder: Path) -> None: ...

    @classmethod
    def check(cls, recipe: Recipe) -> dict[str, Any]:
        """The checked fields of the recipe's engine.

        Raises `UserError` for a field that makes no sense in training.
        """
        for name in recipe.engine:
            if name in cls.without:
                raise UserError(f"engine.{name}: {cls.without[name]}")
        return engine_fields(recipe)

    async def start(self) -> None:
        """Begin what takes long, without waiting for it. Raises `UserError` where the engine cannot be had."""

    @abstractmethod
    async def open(self, progress: Progress | None = None) -> None:
        """Wait until the engine can sample. Raises `UserError` where it cannot be had. Safe to call twice."""

    @abstractmethod
    async def publish(self, version: str) -> None:
        """Let the engine sample from the policy's weights as they are now, and call them `version`.

        Equal versions are equal weights. Returns when no response will come from older weights. Raises `EngineError`.
        """

    async def before_update(self) -> None:
        """The policy is about to be trained: memory that both need goes to the trainer."""

    async def after_update(self) -> None:
        """The policy has been trained; `publish` follows."""

    async def close(self) -> None:
        """Give the engine back, and all that was written for it. Safe to call twice."""
        await self.engine.close()


class InProcessSync(WeightSync):
    """An engine over the very model that is trained: its weights are always the current ones."""

    without: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("revision", "device", "dtype"), "in training the engine runs the policy's own model; see `policy`"
    )

    def __init__(self, recipe: Recipe, policy: Policy, tokenizer: Any, folder: Path) -> None:
        from stepgym.model.engines.transformers import TransformersEngine

        fields = self.check(recipe)
        name = fields.pop("model")
        self._engine = TransformersEngine.wrap(policy.model, tokenizer, name=name, **fields)
        self.engine = self._engine

    async def start(self) -> None:
        """Open the engine: it takes no time, and a setting that does not fit the model shows at once."""
        await self._engine.open()

    async def open(self, progress: Progress | None = None) -> None:
        """Open the engine where `start` has not."""
        await self._engine.open()

    async def publish(self, version: str) -> None:
        """Tell the engine that its weights are new: it forgets what it cached, and steps record the version."""
        self._engine.weights_version = version


SYNCS: Registry[type[WeightSync]] = Registry(
    "weight sync",
    {
        "transformers": "stepgym.train.sync:InProcessSync",
        "vllm": "stepgym.train.vllm_sync:VLLMSync",
    },
    group="stepgym.syncs",
)
"""By kind of engine. A plug-in that adds an engine which can be trained adds its sync under the same name."""


def find_sync(recipe: Recipe) -> type[WeightSync]:
    """The way to the recipe's engine. Raises `UserError` for an engine that new weights cannot be given to."""
    kind = recipe.engine["kind"]
    if kind not in SYNCS:
        raise UserError(
            f"engine.kind: training needs an engine that new weights can be given to, and {kind!r} is not one; "
            f"use {' or '.join(SYNCS.names())}"
        )
    return SYNCS.get(kind)


def check_sync(recipe: Recipe) -> None:
    """Refuse an engine, or a field of it, that cannot be trained with; see `WeightSync.check`."""
    find_sync(recipe).check(recipe)


def make_sync(recipe: Recipe, policy: Policy, tokenizer: Any, folder: Path) -> WeightSync:
    """The recipe's engine with the way from a policy to it, neither started nor open. Raises as `check_sync`."""
    return find_sync(recipe)(recipe, policy, tokenizer, folder)
