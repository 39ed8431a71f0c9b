"""How new weights reach the engine that samples from them. `SYNCS` finds the way for a kind of engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from stepgym.errors import UserError
from stepgym.model.engines.base import Engine
from stepgym.plugins import Registry
from stepgym.train.recipe import Recipe, engine_fields

if TYPE_CHECKING:
    import torch

    from stepgym.train.policy import Policy

Progress = Callable[[str], None]
"""Told what is being waited for, in a line that replaces the one before; from any thread."""


Gathered: TypeAlias = "Mapping[str, torch.Tensor] | None"
"""Weights by name, taken from a policy that several processes share; None: they are read from the policy itself."""


class WeightSync(ABC):
    """An engine, and the way from the policy that is trained to it. Where several processes train, rank 0 has one.

    The order of calls is `start`, `open`, then for each update `before_update`, `after_update`, `publish`; and `close`.
    Between `open` and `close` the engine samples, but not between `before_update` and `publish`, unless rollouts
    overlap with training. Then the engine samples all the time, also while `publish` is under way.

    Args:
        recipe: Where the engine's fields are.
        policy: The model that is trained.
        tokenizer: Its tokenizer.
        folder: A folder for the engine's logs.
        plain: What `before_policy` returned.
        weights: What `gather` returned for the start.

    Attributes:
        engine: The engine. It samples from the weights that were published last.
        waits_for: What `open` waits for, in a word, where that takes long; else empty.
    """

    engine: Engine
    waits_for: ClassVar[str] = ""
    without: ClassVar[Mapping[str, str]] = {}
    """Fields of the engine that make no sense in training, and why."""
    overlaps: ClassVar[bool] = False
    """Whether the engine may sample while the policy is trained, and take new weights while it samples."""
    gathers: ClassVar[bool] = False
    """Whether weights may come from a policy that several processes share."""

    @abstractmethod
    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        tokenizer: Any,
        folder: Path,
        *,
        plain: Any = None,
        weights: Gathered = None,
    ) -> None: ...

    @classmethod
    def suited(cls, recipe: Recipe, processes: int) -> type[WeightSync]:
        """The sync of this engine for a run: this class, or another one for the same engine.

        Raises `UserError` where the engine cannot serve a run whose rollouts overlap with training, or one of several
        processes.
        """
        kind = recipe.engine["kind"]
        if recipe.overlap.kind != "none" and not cls.overlaps:
            raise UserError(f"overlap.kind: the engine {kind!r} cannot sample while the policy is trained; use none")
        if processes > 1 and not cls.gathers:
            raise UserError(f"engine.kind: {kind!r} takes weights from one training process, and there are {processes}")
        return cls

    @classmethod
    def check(cls, recipe: Recipe) -> dict[str, Any]:
        """The checked fields of the recipe's engine.

        Raises `UserError` for a field that makes no sense in training.
        """
        for name in recipe.engine:
            if name in cls.without:
                raise UserError(f"engine.{name}: {cls.without[name]}")
        return engine_fields(recipe)

    @classmethod
    def before_policy(cls, model: Any) -> Any:
        """What the sync needs of the model as it was loaded, before a policy adds an adapter to it or shards it."""
        return None

    @classmethod
    def gather(cls, recipe: Recipe, policy: Policy, *, start: bool = False) -> Gathered:
        """What rank 0 is about to publish, whole, in main memory; None on the others, and with one process.

        Collective: every rank calls it, so no rank waits for what another does with the weights afterwards.

        Args:
            recipe: Where the engine's fields are.
            policy: Where the weights are.
            start: Whether these are the weights that the engine starts with.
        """
        return None

    async def start(self) -> None:
        """Begin what takes long, without waiting for it. Raises `UserError` where the engine cannot be had."""

    @abstractmethod
    async def open(self, progress: Progress | None = None) -> None:
        """Wait until the engine can sample. Raises `UserError` where it cannot be had. Safe to call twice."""

    @abstractmethod
    async def publish(self, version: str, weights: Gathered = None) -> None:
        """Let the engine sample from the policy's weights as they are now, and call them `version`.

        Equal versions are equal weights. Returns when no token will come from older weights. What is being sampled
        goes on under the new ones. Raises `EngineError`.

        Args:
            version: The number of updates that made them.
            weights: What `gather` returned.
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

    @classmethod
    def suited(cls, recipe: Recipe, processes: int) -> type[WeightSync]:
        """A copy of the model, where the engine cannot share it: in overlap, and with several processes."""
        from stepgym.train.copy_sync import CopySync

        shared = recipe.overlap.kind == "none" and processes == 1
        return cls if shared else CopySync.suited(recipe, processes)

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
        self._engine = TransformersEngine.wrap(policy.model, tokenizer, name=name, **fields)
        self.engine = self._engine

    async def start(self) -> None:
        """Open the engine: it takes no time, and a setting that does not fit the model shows at once."""
        await self._engine.open()

    async def open(self, progress: Progress | None = None) -> None:
        """Open the engine where `start` has not."""
        await self._engine.open()

    async def publish(self, version: str, weights: Gathered = None) -> None:
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


def find_sync(recipe: Recipe, processes: int = 1) -> type[WeightSync]:
    """The way to the recipe's engine, from a policy that so many processes train.

    Raises `UserError` for an engine that new weights cannot be given to, or not in this way.
    """
    kind = recipe.engine["kind"]
    if kind not in SYNCS:
        raise UserError(
            f"engine.kind: training needs an engine that new weights can be given to, and {kind!r} is not one; "
            f"use {' or '.join(SYNCS.names())}"
        )
    return SYNCS.get(kind).suited(recipe, processes)


def check_sync(recipe: Recipe, processes: int = 1) -> None:
    """Refuse an engine, or a field of it, that cannot be trained with; see `find_sync` and `WeightSync.check`."""
    find_sync(recipe, processes).check(recipe)


def make_sync(recipe: Recipe, policy: Policy, tokenizer: Any, folder: Path, **options: Any) -> WeightSync:
    """The recipe's engine with the way from a policy to it, neither started nor open.

    `options` as of `WeightSync`. Raises as `check_sync`.
    """
    return find_sync(recipe, policy.processes.size)(recipe, policy, tokenizer, folder, **options)
