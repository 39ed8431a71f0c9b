"""Prompts inside an open assistant turn (`turns: continue`): what they have to hold, and how one differs."""

from __future__ import annotations

from collections.abc import Iterator

from stepgym.errors import UserError
from stepgym.inspect.audit.check import Fault
from stepgym.inspect.audit.context import snippet
from stepgym.inspect.audit.views import StepView
from stepgym.model.open_turn import observation_text
from stepgym.record.delta import common_prefix
from stepgym.record.step import Ids


def observation_ids(view: StepView) -> Ids:
    """int32 ids of what the environment answered, all of them. Raises `UserError` where it answered no text."""
    return view.rendering.ids(observation_text(view.step.new_messages))


def most_observation_tokens(view: StepView) -> int | None:
    """`max_observation_tokens` as the trajectory recorded it, else the renderer's."""
    provenance = view.trajectory.provenance
    if "turns" in provenance:
        recorded = provenance.get("max_observation_tokens")
        return recorded if isinstance(recorded, int) else None
    return view.rendering.renderer.max_observation_tokens


def turn_faults(view: StepView) -> Iterator[Fault]:
    """Whether the turn that the prompt stands in is open: the model's end of it must not have stayed."""
    parent = view.parent
    if parent is None or not parent.has_ids or parent.ended_by is None:
        return
    if view.step.rendering == "continued" and view.extends:
        end = view.rendering.decode(parent.response_ids[-1:])
        yield Fault(
            f"the prompt does not stand in an open turn: step {parent.index} ended it with {end!r}, which stayed in",
            parent.step.length - 1,
        )


def prompt_faults(view: StepView) -> Iterator[Fault]:
    """How the prompt differs from what was sent and sampled, and then the observation. Not for one that leaves that."""
    parent = view.parent
    if parent is None or not parent.has_ids or view.shared < view.kept:
        return  # `follows` and `not_extended` say so
    if view.step.rendering == "turn_reopened" and parent.ended_by is None:
        yield Fault(
            f"the turn is said to be reopened, but the response of step {parent.index} ends in no stop token: "
            "a token that was sampled is left out",
            min(view.kept, view.step.length - 1),
        )
        return
    strange = next((m for m in view.step.new_messages if m.get("role") != "user"), None)
    if strange is not None:
        yield Fault(f"a message of the role {strange.get('role')!r} stands inside the open turn", view.kept)
        return
    try:
        whole = observation_ids(view)
    except UserError as error:
        yield Fault(f"the prompt cannot have been made: {error}")
        return
    most = most_observation_tokens(view)
    wanted, added = whole[:most], view.prompt_ids[view.kept :]
    if len(wanted) == len(added) and (wanted == added).all():
        return
    at = common_prefix(wanted, added)
    token = view.kept + min(at, max(0, len(added) - 1))
    yield Fault(_say(view, whole, most, added), min(token, view.step.length - 1))


def _say(view: StepView, whole: Ids, most: int | None, added: Ids) -> str:
    limit = "there is no max_observation_tokens" if most is None else f"max_observation_tokens is {most}"
    if common_prefix(whole, added) == len(added):
        return f"{len(added)} of the observation's {len(whole)} tokens stand in the prompt; {limit}"
    decode = view.rendering.decode
    wanted, found = decode(whole[:most]), decode(added)
    if found == wanted:
        return "the prompt has the observation's text, but not the tokenizer's ids for it: the tokenisation is wrong"
    forged = next((text for text in view.rendering.ends if text in found and text not in wanted), None)
    what = f"a template's text ({forged!r}) stands in the open turn" if forged else "another text stands in the prompt"
    if found.startswith(wanted):
        return f"{what}: it goes on after the observation with {snippet(found[len(wanted) :], 0)}"
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found)))
    return f"{what}: {snippet(found, at)} where the observation has {snippet(wanted, at)}"
