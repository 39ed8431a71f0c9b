"""Chat messages in the OpenAI wire format, as plain dicts, so that what people have works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from stepgym.errors import ActionError

Message: TypeAlias = dict[str, Any]
"""`role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `reasoning_content`.

An assistant message that comes from a session also has `text` (the turn as sampled, with any reasoning opener that
the prompt ended in) and `invalid_tool_calls: [{text, error}]`.
"""


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant message that says `content`, as a session would return it."""
    return {"role": "assistant", "content": content, "text": content}


def tool_result(content: str, call_id: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def as_assistant(action: object) -> Message:
    """The assistant message that an action stands for; a plain string is one without tool calls.

    Raises `ActionError` for anything that is neither.
    """
    if isinstance(action, str):
        return assistant(action)
    if not isinstance(action, Mapping):
        raise ActionError(f"an action is an assistant message or a string, not {type(action).__name__}", status="malformed")
    if action.get("role", "assistant") != "assistant":
        raise ActionError(f"an action has the role 'assistant', not {action.get('role')!r}", status="malformed")
    content = action.get("content")
    if content is not None and not isinstance(content, str):
        raise ActionError(f"'content' must be text, not {type(content).__name__}", status="malformed")
    message: Message = {**action, "role": "assistant", "content": content or ""}
    if not isinstance(message.get("text"), str):
        message["text"] = message["content"]
    return message


def as_observation(observation: object) -> list[Message]:
    """The list of new messages that an observation stands for; a string is one user message."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [user(observation)]
    if isinstance(observation, Mapping):
        return [dict(observation)]
    return [dict(message) for message in observation]  # type: ignore[attr-defined]
