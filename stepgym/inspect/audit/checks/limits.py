"""Checks of lengths, and of why responses ended."""

from __future__ import annotations

from collections.abc import Iterator

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.views import StepView


@check("step")
def over_limit(view: StepView) -> Iterator[Fault]:
    """No prompt longer than `max_prompt_tokens` is ever sent, and no response is longer than was asked for (promise 4).

    The limits are those that the trajectory recorded, else those of the run's config.
    """
    if not view.has_ids:
        return
    limits = view.owner.limits
    prompt, response = len(view.prompt_ids), len(view.response_ids)
    if limits.prompt is not None and prompt > limits.prompt:
        yield Fault(f"the prompt has {prompt} tokens, over max_prompt_tokens = {limits.prompt}", limits.prompt)
    elif limits.context is not None and prompt + response > limits.context:
        yield Fault(
            f"prompt and response have {prompt + response} tokens, over the context of {limits.context}", limits.context
        )
    if view.asked is None or response <= view.asked:
        return
    if view.owner.rendering is None or not view.end_is_one_too_many:  # else `appended_end_of_turn` says so
        name = "the step's max_tokens" if view.asked == view.step.max_tokens else "max_response_tokens"
        yield Fault(f"the response has {response} tokens, over {name} = {view.asked}", prompt + view.asked)


@check("step")
def finish_reason(view: StepView) -> Iterator[Fault]:
    """Why a response ended agrees with its ids: `length` means that all tokens asked for were sampled."""
    step = view.step
    if not view.has_ids:
        return
    response, at = len(view.response_ids), max(0, step.length - 1)
    if step.finish_reason == "length" and step.max_tokens is not None and response < step.max_tokens:
        yield Fault(
            f"it says that the response was cut by length, at {response} of {step.max_tokens} tokens",
            at,
            severity="warning",
        )
    if (step.finish_reason == "length") != (step.status == "truncated"):
        yield Fault(
            f"finish_reason is {step.finish_reason!r}, but the turn's status is {step.status!r}", at, severity="warning"
        )
    if step.finish_reason == "abort":
        yield Fault("the request was aborted, and the turn was recorded all the same", at, severity="warning")


@check("step", name="end_of_response", needs="tokenizer")
def end_of_response(view: StepView) -> Iterator[Fault]:
    """A response that ended by `stop` ends in a stop token or holds a stop string; one cut by length does neither."""
    step = view.step
    if not view.has_ids or not len(view.response_ids):
        return
    stopped = view.ended_by is not None or view.stopped_at is not None
    if step.finish_reason == "stop" and not stopped:
        yield Fault(
            "it says that the response was stopped, but it ends in no stop token and holds no stop string",
            step.length - 1,
            severity="warning",
        )
    if step.finish_reason == "length" and view.ended_by is not None:
        yield Fault(
            "it says that the response was cut by length, but it ends in a stop token",
            step.length - 1,
            severity="warning",
        )
