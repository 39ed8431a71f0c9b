"""Chat messages in the OpenAI wire format, as plain dicts, so that what people have works."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from stepgym.errors import ActionError, EnvError

Message: TypeAlias = dict[str, Any]
"""`role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `reasoning_content`.

An assistant message that comes from a session also has `text` (the turn as sampled, with any reasoning opener that
the prompt ended in) and `invalid_tool_calls: [{text, error}]`.
"""


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant message that says `content`, as a session would return it."""
    return {"role": "assistant", "content": content, "text": content}


def tool_result(content: str, call_id: str) -> Message:
    """The result of the tool call with that id."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def tool_call(name: str, /, **arguments: Any) -> Message:
    """An assistant message that calls one tool, as an expert would write it."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def call_id(call: object, index: int) -> str:
    """The id of a tool call, or `call_<index>` where it has none."""
    given = call.get("id") if isinstance(call, Mapping) else None
    return given if isinstance(given, str) and given else f"call_{index}"


def as_assistant(action: object) -> Message:
    """The assistant message that an action stands for; a plain string is one without tool calls.

    Raises `ActionError` for anything that is neither.
    """
    if isinstance(action, str):
        return assistant(action)
    if not isinstance(action, Mapping):
        raise ActionError(
            f"an action is an assistant message or a string, not {type(action).__name__}", status="malformed"
        )
    if action.get("role", "assistant") != "assistant":
        raise ActionError(f"an action has the role 'assistant', not {action.get('role')!r}", status="malformed")
    content = _text_of(action.get("content"))
    for field in ("tool_calls", "invalid_tool_calls"):
        if not isinstance(action.get(field), list | tuple | None):
            kind = type(action[field]).__name__
            raise ActionError(f"{field!r} must be a list, not {kind}", status="malformed")
    message: Message = {**action, "role": "assistant", "content": content}
    if not isinstance(message.get("text"), str):
        message["text"] = message["content"]
    return message


def _text_of(content: object) -> str:
    """The text of a content: text, None, or a list of text parts as some clients send it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise ActionError(f"'content' must be text, not {type(content).__name__}", status="malformed")


def as_observation(observation: object) -> list[Message]:
    """The list of new messages that an observation stands for; a string is one user message.

    Raises `EnvError` for anything else: the environment made it, not the agent.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [user(observation)]
    if isinstance(observation, Mapping):
        return [dict(observation)]
    if isinstance(observation, list | tuple) and all(isinstance(message, Mapping) for message in observation):
        return [dict(message) for message in observation]
    raise EnvError(f"an observation is text, a message or a list of messages, not {observation!r:.200}")
