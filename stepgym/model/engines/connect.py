"""Finds out what an endpoint can do, and gives the engine for it."""

from __future__ import annotations

import logging
from typing import Literal

from stepgym.errors import UserError
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.model.engines.chat import OpenAIChatEngine
from stepgym.model.engines.openai import NoTokenIds, OpenAIEngine

logger = logging.getLogger(__name__)


async def connect(
    base_url: str,
    model: str,
    *,
    tokenizer: str | None = None,
    api: Literal["auto", "chat", "completions"] = "auto",
    api_key: str | None = None,
    logprobs_kind: Literal["processed", "raw", "unknown"] = "unknown",
    context_length: int | None = None,
    request_timeout: float = 600.0,
    max_connections: int = 256,
    retries: int = 3,
) -> Engine | ChatEngine:
    """Connect to an endpoint; the engine that comes back is open.

    Args:
        base_url: Address of the server's `/v1`.
        model: Name under which it serves the model.
        tokenizer: Folder or hub name of the model's tokenizer.
        api: `completions` sends and takes token ids, so that every token is recorded (needs a tokenizer: `model` is
            tried where none is given). `chat` sends messages. `auto` takes `completions` if a tokenizer is given and
            the endpoint proves to return ids, else `chat`.
        api_key, logprobs_kind, context_length, request_timeout, max_connections, retries: As for `OpenAIEngine`.

    Raises:
        UserError: The endpoint cannot be reached, refuses the key, does not serve the model, or cannot do what `api`
            asks for.
    """
    if api not in ("auto", "chat", "completions"):
        raise UserError(f"engine: api must be auto, chat or completions, not {api!r}")
    if api == "completions" or (api == "auto" and tokenizer is not None):
        engine = OpenAIEngine(
            base_url=base_url,
            model=model,
            tokenizer=tokenizer,
            api_key=api_key,
            logprobs_kind=logprobs_kind,
            context_length=context_length,
            request_timeout=request_timeout,
            max_connections=max_connections,
            retries=retries,
        )
        try:
            await engine.open()
            return engine
        except NoTokenIds as error:
            await engine.close()
            if api == "completions":
                raise
            logger.info("going over to chat: %s", error)
        except UserError:
            await engine.close()
            raise
    chat = OpenAIChatEngine(
        base_url=base_url,
        model=model,
        api_key=api_key,
        context_length=context_length,
        request_timeout=request_timeout,
        max_connections=max_connections,
        retries=retries,
    )
    try:
        await chat.open()
    except UserError:
        await chat.close()
        raise
    return chat
