"""`turns: continue`: one assistant turn that model and environment write together, as Search-R1 was published.

The first prompt of a conversation is rendered by its template and opens an assistant turn. From then on nothing is
rendered: what the environment answers is appended to the ids as it is, inside that turn, and the model goes on. Where
the model closed the turn (its response ends in a stop token) and the environment goes on all the same, that token is
taken back. Messages are those of any conversation; only what the model sees of them differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from stepgym.errors import UserError
from stepgym.model.continuation import Turn
from stepgym.model.prompt import Prompt
from stepgym.record.step import Ids


class OpenTurn:
    """Makes the later prompts of a conversation that is one assistant turn.

    Args:
        encode: Text to int32 ids, no special tokens added.
        stop_token_ids: Ids that end a response.
        max_observation_tokens: Most ids of one observation: the ids are cut, whatever stands there. None: all stay.
    """

    def __init__(
        self, encode: Callable[[str], Ids], stop_token_ids: Collection[int], max_observation_tokens: int | None
    ) -> None:
        self._encode = encode
        self._stop_token_ids = frozenset(stop_token_ids)
        self.max_observation_tokens = max_observation_tokens

    def prompt(self, messages: Sequence[Mapping[str, Any]], previous: Turn, *, reasoning_open: bool) -> Prompt | None:
        """The prompt after a turn of the model; None where a new message closes the turn for good.

        Its cost is that of the observation; where a turn is taken up again the earlier ids are copied, not made anew.

        Args:
            messages: The whole conversation.
            previous: The model's last turn, with its ids.
            reasoning_open: Whether that left reasoning open.

        Raises `UserError` for an observation that is not text.
        """
        if previous.prompt_ids is None or previous.response_ids is None:
            raise ValueError("turns: continue goes on from ids; the previous turn has none")
        news = messages[len(previous.messages) + 1 :]
        if any(message.get("role") != "user" for message in news):
            return None
        text = observation_text(news)
        added = self.observation_ids(text)
        said = previous.response_ids
        if not len(said) or int(said[-1]) not in self._stop_token_ids:
            return Prompt(text, added, True, "continued", reasoning_open=reasoning_open)
        whole = np.concatenate([previous.prompt_ids, said[:-1], added])
        return Prompt(text, whole, False, "turn_reopened", reasoning_open=reasoning_open)

    def observation_ids(self, text: str) -> Ids:
        """int32 ids of an observation, cut to `max_observation_tokens`."""
        return self._encode(text)[: self.max_observation_tokens]


def observation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The contents of messages, joined as they are. Raises `UserError` for a content that is not text."""
    return "".join(_text_of(message.get("content")) for message in messages)


def _text_of(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise UserError(f"turns: continue appends observations as text; a message's content is {type(content).__name__}")


def check_turns(turns: str, history: str, max_observation_tokens: int | None) -> None:
    """Refuse settings of a renderer that do not go together. Raises `UserError`."""
    if turns not in ("conversation", "continue"):
        raise UserError(f"renderer.turns: {turns!r} is not known; it is conversation or continue")
    if turns == "conversation":
        if max_observation_tokens is not None:
            raise UserError(
                "renderer.max_observation_tokens: only observations inside an open turn are cut; set turns: continue"
            )
        return
    if history == "append":
        raise UserError("renderer.history: append has no place under turns: continue, which keeps what was sampled")
    if max_observation_tokens is not None and max_observation_tokens < 1:
        raise UserError(f"renderer.max_observation_tokens: must be at least 1, not {max_observation_tokens}")


def refuse_for_chat(turns: str, history: str) -> None:
    """Refuse what an engine that speaks only chat cannot do: it has no ids to go on from. Raises `UserError`."""
    for name, value, usual in (("turns", turns, "conversation"), ("history", history, "template")):
        if value != usual:
            raise UserError(
                f"renderer.{name}: {value} needs an engine that takes token ids; one that speaks only chat renders "
                f"every prompt itself (give the tokenizer of a server with /v1/completions, or set it to {usual})"
            )
