"""Checks of what turns were taken to say: their text, their tool calls, and rewards for what could not be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.context import snippet
from stepgym.inspect.audit.reading import read_again
from stepgym.inspect.audit.views import StepView, TrajectoryView

_CALL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<|tool_call",
               "<function_call>")  # fmt: skip
_JSON_CALL = re.compile(r'\{\s*"(?:name|function)"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:')


@check("step", needs="tokenizer")
def message_text(view: StepView) -> Iterator[Fault]:
    """A message's text is its response, decoded: up to the stop string, with any reasoning that the prompt opened."""
    message = view.step.message
    if not view.has_ids or message is None or view.step.sampler == "scripted":
        return
    fresh = read_again(view)
    for name, what in (("text", "text"), ("content", "content"), ("reasoning_content", "reasoning")):
        said, read = message.get(name) or "", fresh.get(name) or ""
        if said != read:
            at = next(
                (i for i, (a, b) in enumerate(zip(said, read, strict=False)) if a != b), min(len(said), len(read))
            )
            yield Fault(
                f"the message's {what} is not the decoded response: {snippet(str(said), at)} is recorded, "
                f"{snippet(str(read), at)} was sampled",
                len(view.prompt_ids),
            )
            return


@check("step", needs="tokenizer")
def tool_calls(view: StepView) -> Iterator[Fault]:
    """The tool calls of a message are those that its response parses to."""
    message = view.step.message
    if not view.has_ids or message is None or view.step.sampler == "scripted" or not view.tools:
        return
    fresh = read_again(view)
    for name, what in (("tool_calls", "tool calls"), ("invalid_tool_calls", "malformed tool calls")):
        said, read = _calls(message, name), _calls(fresh, name)
        if said != read:
            yield Fault(
                f"the message has {_number(said, what)} where its response parses to {_number(read, what)}",
                len(view.prompt_ids),
            )
            return


@check("step")
def unparsed_tool_call(view: StepView) -> Iterator[Fault]:
    """A turn that looks like a tool call is a tool call or a malformed one, never a final answer."""
    step, message = view.step, view.step.message
    if message is None or not view.tools or message.get("tool_calls") or message.get("invalid_tool_calls"):
        return
    text = str(message.get("text") or message.get("content") or "")
    text = text.rpartition("</think>")[2]
    mark = next((mark for mark in _CALL_MARKS if mark in text), None)
    named = _JSON_CALL.search(text)
    known = {str((tool.get("function") or tool).get("name")) for tool in view.tools}
    if mark is None and (named is None or named[1] not in known):
        return
    looks = mark or (named[0] if named else "")
    yield Fault(
        f"the turn looks like a tool call ({looks!r}) and was parsed as none; its status is {step.status!r}",
        _token_of(view, looks),
    )


@check("trajectory")
def rewarded_malformed(view: TrajectoryView) -> Iterator[Fault]:
    """A turn that could not be read earns nothing, and an episode with one is seldom worth a reward."""
    bad = [each for each in view.steps if each.step.status == "malformed"]
    for each in bad:
        if each.step.reward > max(0.0, view.trajectory.reward_range[0]):
            yield Fault(f"a malformed turn has the reward {each.step.reward:g}", _last(each), step=each.index)
            return
    reward = view.trajectory.reward
    if bad and reward is not None and reward > max(0.0, view.trajectory.reward_range[0]):
        yield Fault(
            f"the episode has the reward {reward:g}, and {len(bad)} of its {len(view.steps)} turns are malformed",
            _last(bad[0]),
            severity="warning",
            step=bad[0].index,
        )


def _calls(message: Mapping[str, Any], name: str) -> list[Any]:
    found: list[Any] = []
    for call in message.get(name) or ():
        if name == "invalid_tool_calls":
            found.append(call.get("text"))
            continue
        function = call.get("function") or {}
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            pass
        found.append([function.get("name"), arguments])
    return found


def _number(calls: list[Any], what: str) -> str:
    return f"{len(calls)} {what} ({', '.join(str(call)[:60] for call in calls)})" if calls else f"no {what}"


def _last(view: StepView) -> int | None:
    return view.step.length - 1 if view.has_ids and view.step.length else None


def _token_of(view: StepView, text: str) -> int | None:
    """Where in the response a text begins; its first token where there is no tokenizer."""
    if not view.has_ids:
        return None
    start = len(view.prompt_ids)
    if view.owner.rendering is None or (at := view.spoken.find(text)) < 0:
        return start
    ids, low, high = view.response_ids, 0, len(view.response_ids)
    while low < high:  # the number of tokens whose text ends at or before it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(view.rendering.decode(ids[:middle])) <= at else (low, middle - 1)
    return start + low
