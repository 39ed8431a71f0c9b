"""One model turn, exactly as the model saw it and said it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids: TypeAlias = NDArray[np.int32]
StepStatus = Literal["ok", "no_action", "malformed", "truncated"]
SamplerKind = Literal["policy", "scripted"]
WeightsSpan: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a response was sampled. Training needs every one of these to know what a logprob means.

    `top_k=0`, `top_p=1`, `min_p=0` and neutral penalties mean untruncated sampling from softmax(logits / temperature).
    `logprobs_kind` says what the engine's logprobs are: `processed` (log-softmax of logits / temperature,
    untruncated), `raw` (before the temperature) or `unknown`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs_kind: Literal["processed", "raw", "unknown"] = "processed"

    def departures(self) -> dict[str, tuple[float, float]]:
        """Settings for which it is not sampling from softmax(logits / temperature): name to (value, neutral value)."""
        return {
            name: (value, neutral) for name, neutral in _NEUTRAL.items() if (value := getattr(self, name)) != neutral
        }


_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One model turn. Immutable: change one with `dataclasses.replace`.

    Attributes:
        prompt_ids: int32 array [P], the ids the engine was sent; None for an engine that speaks only chat.
        response_ids: int32 array [R], exactly the ids the engine returned; None for an engine that speaks only chat.
        loss_mask: int8 array [R], 1 where the engine returned the token as generated. None at construction means ones.
        logprobs: float32 array [R] of the sampler, or None where there are none (absent). An empty array means that
            there were no tokens; the two are different things.
        reward: What the environment gave for this turn; it sits on the last response token.
        reward_parts: Named parts that the reward is made of.
        sampler: `policy`, or `scripted` for an expert's turn (which has no logprobs).
        status: What the turn was: `ok`, `no_action`, `malformed` or `truncated`.
        finish_reason: As the engine gave it: `stop`, `length`, `abort`, ...
        new_messages: The messages that were added to the conversation since the turn that it `follows` (else: all).
        message: The assistant message that was parsed from the response.
        rendering: How the prompt came about. `first`: rendered from scratch, to begin a conversation. `extended`: what
            was sent and sampled before, plus new tokens, which says what the template says of the whole conversation.
            `appended`: extended too, where the template would have rewritten earlier turns (`history: append`), in
            this turn or before. `continued`: what was sent and sampled before, plus the observation, inside the open
            assistant turn (`turns: continue`); `turn_reopened`: the same, without the stop token in which the model
            had ended its response. All else is a reason for which the prompt was rendered anew: `thinking_stripped`
            (the template leaves out earlier reasoning), `template_rewrote_history` (it writes earlier messages in
            another way), `truncated_turn` (a turn that was cut off is not written as it was sampled), `tools_changed`
            (other tools on offer), `agent_rewrote_history` (the agent's messages are not those of the record),
            `turn_closed` (a message that is not the user's ends an open turn). Empty where unknown (steps made by
            hand).
        sampling: How the response was sampled; None where unknown.
        stop: Strings that would have ended the response.
        max_tokens: Most tokens that were asked for; None where unknown.
        follows: Index of the earlier step of the trajectory whose conversation this one goes on with; None where it
            begins a conversation. (`Delta.parent` is about tokens: it may be another step.)
        weights_versions: Spans (version, start, end) over the response tokens.
        routed_experts: int16 array [P + R, layers, k] of expert indices, -1 where absent; None without routing.
        metrics: Numbers about the turn (times in seconds, token counts).
    """

    prompt_ids: Ids | None
    response_ids: Ids | None
    loss_mask: NDArray[np.int8] | None = None
    logprobs: NDArray[np.float32] | None = None
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    sampler: SamplerKind = "policy"
    status: StepStatus = "ok"
    finish_reason: str = "stop"
    new_messages: Sequence[Mapping[str, Any]] = ()
    message: Mapping[str, Any] | None = None
    rendering: str = ""
    sampling: Sampling | None = None
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    follows: int | None = None
    weights_versions: Sequence[WeightsSpan] = ()
    routed_experts: NDArray[np.int16] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in (
            ("prompt_ids", np.int32),
            ("response_ids", np.int32),
            ("loss_mask", np.int8),
            ("logprobs", np.float32),
            ("routed_experts", np.int16),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _frozen_array(value, dtype))
        if (self.prompt_ids is None) != (self.response_ids is None):
            raise ValueError("Step: prompt_ids and response_ids are both given or both None")
        if self.response_ids is None:
            return
        length = len(self.response_ids)
        if self.loss_mask is None:
            object.__setattr__(self, "loss_mask", _frozen_array(np.ones(length), np.int8))
        for name in ("loss_mask", "logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"Step: {name} has {len(value)} entries for {length} response tokens")
        if self.routed_experts is not None and len(self.routed_experts) != self.length:
            raise ValueError(f"Step: routed_experts has {len(self.routed_experts)} rows for {self.length} tokens")

    @property
    def length(self) -> int:
        """Number of tokens, prompt and response together; 0 where there are no ids."""
        if self.prompt_ids is None or self.response_ids is None:
            return 0
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def full_ids(self) -> Ids:
        """int32 array [P + R]: prompt and response, in order."""
        if self.prompt_ids is None or self.response_ids is None:
            raise ValueError("this step has no token ids: it came from an engine that speaks only chat")
        return np.concatenate([self.prompt_ids, self.response_ids])


def _frozen_array(value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """A read-only array of `dtype` over `value`; arrays that fit already are shared, not copied."""
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        if not value.flags.writeable:
            return value
        array = value.view()
    else:
        array = np.asarray(value, dtype=dtype)
        if array is value:
            array = array.view()
    array.flags.writeable = False
    return array
