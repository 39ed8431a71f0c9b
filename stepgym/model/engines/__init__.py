"""Engines: token ids in, token ids out. `ENGINES` finds one by its kind; looking at it imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgym.plugins import Registry

if TYPE_CHECKING:
    from stepgym.model.engines.base import ChatEngine, Engine

ENGINES: Registry[type[Engine] | type[ChatEngine]] = Registry(
    "engine",
    {
        "chat": "stepgym.model.engines.chat:OpenAIChatEngine",
        "openai": "stepgym.model.engines.openai:OpenAIEngine",
        "scripted": "stepgym.model.engines.scripted:ScriptedEngine",
        "transformers": "stepgym.model.engines.transformers:TransformersEngine",
        "vllm": "stepgym.model.engines.vllm.engine:VLLMEngine",
    },
    group="stepgym.engines",
)

__all__ = ["ENGINES"]
