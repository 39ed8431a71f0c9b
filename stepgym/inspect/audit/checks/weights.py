"""Checks of which weights sampled what."""

from __future__ import annotations

from collections.abc import Iterator

from stepgym.inspect.audit.check import Fault, check
from stepgym.inspect.audit.statistics import Statistics, newest
from stepgym.inspect.audit.views import TRAINED_PHASE, StepView


@check("step")
def weights_spans(view: StepView) -> Iterator[Fault]:
    """The spans of weights versions cover a response from its first token to its last, and never go back in time."""
    step = view.step
    if not view.has_ids or not step.weights_versions:
        return
    start, at = len(view.prompt_ids), 0
    response = len(view.response_ids)
    for number, (version, begin, end) in enumerate(step.weights_versions):
        if begin != at or end < begin or (end == begin and response):
            yield Fault(
                f"span {number} of the weights versions is {begin} to {end}, where the one before ends at {at}",
                _at(start, begin, response),
            )
            return
        if number and newest([str(version), str(step.weights_versions[number - 1][0])]) != str(version):
            yield Fault(
                f"the weights go back from version {step.weights_versions[number - 1][0]} to {version} in a response",
                _at(start, begin, response),
            )
            return
        at = end
    trained = step.loss_mask is not None and bool(step.loss_mask[min(at, response) :].any())
    if at != response and not trained:  # else `unsampled_token_trained` says so
        yield Fault(
            f"the weights versions cover {at} of {response} tokens of the response",
            _at(start, min(at, response), response),
        )


@check("run")
def stale_weights(run: Statistics) -> Iterator[Fault]:
    """The rollouts of an iteration come from the weights of that iteration, and later ones from no older weights.

    Under `overlap: async` neither is so by its nature: what is found then is a note.
    """
    newest_before: tuple[int, str] | None = None
    asynchronous = run.facts.section("overlap").get("kind") == "async"
    for (phase, iteration), versions in sorted(run.versions.items()):
        if phase != TRAINED_PHASE:
            continue
        current = newest(list(versions))
        for version, use in versions.items():
            if version != current:
                yield Fault(
                    f"version {version} of the weights sampled {use.tokens} tokens; the iteration's is {current}",
                    use.token,
                    # Weights that change while responses are sampled leave older tokens by their nature.
                    severity="note" if asynchronous or (phase, iteration) in run.in_flight else "warning",
                    step=use.step,
                    trajectory=use.trajectory,
                )
        if newest_before is not None and newest([newest_before[1], current]) != current:
            _, trajectory, step, token = versions[current]
            yield Fault(
                f"iteration {iteration} was sampled with weights of version {current}, "
                f"after iteration {newest_before[0]} with version {newest_before[1]}",
                token,
                severity="note" if asynchronous else "warning",
                step=step,
                trajectory=trajectory,
            )
        newest_before = (iteration, current)


def _at(start: int, position: int, response: int) -> int:
    return start + max(0, min(position, response - 1))
