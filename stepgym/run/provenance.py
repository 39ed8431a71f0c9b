"""Where a trajectory comes from: what every record of a rollout says about model, template and versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.model.renderer import Renderer
from stepgym.run.session import SessionLimits


def provenance_of(
    engine: Engine | ChatEngine | None, renderer: Renderer | None, agent: object, limits: SessionLimits
) -> dict[str, Any]:
    """Model, template, agent, limits and versions, as every trajectory of a rollout keeps them."""
    found: dict[str, Any] = {"python": platform.python_version()}
    found["agent"] = f"{type(agent).__module__}:{type(agent).__qualname__}"
    found["limits"] = {
        "max_prompt_tokens": limits.max_prompt_tokens,
        "max_response_tokens": limits.max_response_tokens,
        "context_length": engine.context_length if engine is not None else None,
    }
    for package in ("stepgym", "transformers", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if engine is not None:
        found |= {"model": engine.model, "engine": engine.kind}
    if renderer is not None:
        found |= {"template": renderer.template.digest, "template_date": renderer.template.today.isoformat()}
        found |= {"renderer": renderer.kind, "history": renderer.history, "turns": renderer.turns}
        if renderer.max_observation_tokens is not None:
            found["max_observation_tokens"] = renderer.max_observation_tokens
    return found
