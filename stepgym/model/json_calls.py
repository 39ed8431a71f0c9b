"""Tool calls written as JSON: Hermes and Qwen, Llama 3, Mistral, and whoever else puts an object between delimiters."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgym.model.tool_calls import Call, Calls, ToolCallFormat

_DECODER = json.JSONDecoder()
_BETWEEN = " \t\r\n;,"
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class JsonCalls(ToolCallFormat):
    """JSON objects with a name and arguments.

    Attributes:
        open: What stands before a call; "" where the whole turn is the call (Llama 3).
        close: What stands after it; "" where it goes on to the turn's end, or to the next `open`.
        arguments_key: `arguments`, or `parameters` as in Llama 3.
        name_key: Where the tool's name stands.
        nested: Whether name and arguments stand inside a `function` object.
        listed: Whether the calls are written as one list.
        id_key: Where the call's id stands; None where none is written.
        short_ids: See `ToolCallFormat`.
    """

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    arguments_key: str = "arguments"
    name_key: str = "name"
    nested: bool = False
    listed: bool = False
    id_key: str | None = None
    short_ids: bool = False

    @property
    def delimiters(self) -> tuple[str, ...]:  # type: ignore[override]
        """Texts that set a call apart."""
        return tuple(text for text in (self.open, self.close) if text) or ("<|python_tag|>",)

    @property
    def marked(self) -> bool:  # type: ignore[override]
        """Whether every call has a delimiter."""
        return bool(self.open)

    def read(self, text: str, shadow: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        """See `ToolCallFormat.read`."""
        if not self.open:
            return self._read_bare(text, tools)
        if self.open not in shadow and (not self.close or self.close not in shadow):
            return Calls(content=text)
        calls, outside, at = Calls(), [], 0
        for begin, stop, end in self._places(text, shadow):
            outside.append((at, begin))
            at = end
            if stop < end or not self.close:
                self._take(calls, text[begin:end], text[begin + len(self.open) : stop])
            else:
                calls.refuse(text[begin:end], f"{self.open} is never closed")
        outside.append((at, len(text)))
        calls.content = "".join(text[a:b] for a, b in outside).strip()
        if self.close and any(self.close in shadow[a:b] for a, b in outside):
            calls.refuse(calls.content, f"{self.close} without {self.open}")
        return calls

    def _places(self, text: str, shadow: str) -> Iterator[tuple[int, int, int]]:
        """Where each call begins, where what stands in it stops, and where it ends; the last two are one if it is open.

        A delimiter inside a string of the call's JSON is a part of that string.
        """
        begin = shadow.find(self.open)
        while begin >= 0:
            start = begin + len(self.open)
            stop = _value_end(text, start)
            whole = stop == len(text) and not self.close
            if stop is None or not (whole or shadow.startswith(self.close or self.open, stop)):
                stop = shadow.find(self.close or self.open, start)
            stop = stop if stop >= 0 else len(text)
            end = min(stop + len(self.close), len(text))
            yield begin, stop, end
            begin = shadow.find(self.open, end)

    def _take(self, calls: Calls, whole: str, body: str) -> None:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            calls.refuse(whole, f"not JSON: {error}")
            return
        for item in self._items(value):
            calls.take(whole, self._call(item))

    def _items(self, value: Any) -> list[Any]:
        return (value or [value]) if self.listed and isinstance(value, list) else [value]

    def _call(self, value: Any) -> Call | str:
        """The call that a JSON value stands for, or what is wrong with it."""
        if self.nested and isinstance(value, dict):
            value = value.get("function")
        if not isinstance(value, dict):
            return f"not a JSON object with {self.name_key!r} and {self.arguments_key!r}"
        name, arguments = value.get(self.name_key), value.get(self.arguments_key, {})
        if not isinstance(name, str) or not name:
            return f"{self.name_key!r} is missing"
        if not isinstance(arguments, dict):
            return f"{self.arguments_key!r} must be a JSON object, not {type(arguments).__name__}"
        given = value.get(self.id_key) if self.id_key else None
        return Call(name, arguments, given if isinstance(given, str) and given else None)

    def _read_bare(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        """The whole turn is a call, or several with `;` between them; `<|python_tag|>` may stand before."""
        tagged = text.lstrip().startswith("<|python_tag|>")
        body = text.replace("<|python_tag|>", "", 1).strip() if tagged else text.strip()
        if not tagged and not body.startswith(("{", "[{")):
            return self._beside(text, tools)
        calls, at = Calls(), 0
        try:
            while at < len(body):
                value, at = _DECODER.raw_decode(body, at)
                for item in value if isinstance(value, list) and value else [value]:
                    call = self._call(item)
                    if isinstance(call, Call) and self.arguments_key not in item:
                        call = f"{self.arguments_key!r} is missing"
                    calls.take(text, call)
                while at < len(body) and body[at] in _BETWEEN:
                    at += 1
        except (ValueError, RecursionError) as error:
            calls = Calls()
            calls.refuse(text, f"not a tool call alone: {error}")
        if calls.invalid and not (
            tagged or self._resembles(body) or any(f'"{name}"' in body for name in _names(tools))
        ):
            return Calls(content=text)  # JSON that says nothing of a tool is an answer in JSON
        return calls

    def _beside(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        """Text that does not start as a call: a call anywhere in it is one that nobody would run."""
        calls = Calls(content=text)
        for match in re.finditer(r"\{", text):
            if not self._resembles(text[match.start() : match.start() + 400]):
                continue
            try:
                value, _ = _DECODER.raw_decode(text, match.start())
            except (ValueError, RecursionError):
                continue
            call = self._call(value)
            if isinstance(call, Call) and call.name in _names(tools):
                calls.refuse(text[match.start() :], "a tool call must be all that the turn says")
                break
        return calls

    def _resembles(self, body: str) -> bool:
        return f'"{self.name_key}"' in body and any(f'"{key}"' in body for key in ("parameters", "arguments"))


def _value_end(text: str, start: int) -> int | None:
    """Where the JSON value at `start` and the white space after it end; None if there is no value."""
    try:
        _, end = _DECODER.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    return _SPACE.match(text, end).end()  # type: ignore[union-attr]


def _names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str((tool.get("function") or tool).get("name")) for tool in tools}


@dataclass(frozen=True, slots=True)
class NamedJsonCalls(ToolCallFormat):
    """Mistral's newer way: `[TOOL_CALLS]name[ARGS]{...}`, each call with a token of its own.

    Attributes:
        short_ids: See `ToolCallFormat`.
    """

    short_ids: bool = False

    @property
    def delimiters(self) -> tuple[str, ...]:  # type: ignore[override]
        """Texts that set a call apart."""
        return ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, text: str, shadow: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        """See `ToolCallFormat.read`."""
        pieces = [match.start() for match in re.finditer(r"\[TOOL_CALLS\]", shadow)]
        calls = Calls(content=text if not pieces else text[: pieces[0]].strip())
        if "[ARGS]" in shadow[: pieces[0] if pieces else len(text)]:
            calls.refuse(text, "[ARGS] without [TOOL_CALLS]")
        for begin, end in itertools.pairwise([*pieces, len(text)]):
            head, separator, _ = shadow[begin + len("[TOOL_CALLS]") : end].partition("[ARGS]")
            if not separator:
                calls.refuse(text[begin:end], "[ARGS] is missing")
                continue
            name, _, given = head.partition("[CALL_ID]")
            try:
                arguments = json.loads(text[begin + len("[TOOL_CALLS]") + len(head) + len("[ARGS]") : end])
            except (ValueError, RecursionError) as error:
                calls.refuse(text[begin:end], f"not JSON: {error}")
                continue
            if not name.strip() or not isinstance(arguments, dict):
                calls.refuse(text[begin:end], "a name and a JSON object of arguments are needed")
            else:
                calls.take(text[begin:end], Call(name.strip(), arguments, given.strip() or None))
        return calls
