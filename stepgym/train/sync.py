"""How new weights reach the engine that samples from them."""

from __future__ import annotations

from typing import Any

from stepgym.errors import UserError
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.train.policy import Policy
from stepgym.train.recipe import Recipe, engine_fields


def engine_for_training(recipe: Recipe, policy: Policy, tokenizer: Any) -> TransformersEngine:
    """An engine over the very model that is trained: its weights are always the current ones.

    Raises `UserError` as `trainable_engine_fields`.
    """
    fields = trainable_engine_fields(recipe)
    name = fields.pop("model")
    return TransformersEngine.wrap(policy.model, tokenizer, name=name, **fields)


def trainable_engine_fields(recipe: Recipe) -> dict[str, Any]:
    """The checked fields of the recipe's engine. Raises `UserError` for one that new weights cannot be given to."""
    kind = recipe.engine["kind"]
    if kind != "transformers":
        raise UserError(
            f"engine.kind: training needs an engine that new weights can be given to, and {kind!r} is not one; "
            "use transformers"
        )
    fields = engine_fields(recipe)
    unused = {"revision", "device", "dtype"} & set(fields)
    if unused:
        raise UserError(f"engine.{min(unused)}: in training the engine runs the policy's own model; see `policy`")
    return fields


def publish(engine: TransformersEngine, version: str) -> None:
    """Tell the engine that its weights are new: it forgets what it cached, and steps record the version."""
    engine.weights_version = version
