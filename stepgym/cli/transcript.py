"""A trajectory as lines for the terminal: header, conversation, tokens. What a model said never steers the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.text import Text

from stepgym.inspect.plain_text import plain, shortened
from stepgym.inspect.show import Shown
from stepgym.inspect.token_text import TokenTexts
from stepgym.model.prompt import OPEN_TURN
from stepgym.record.json_text import dump_json
from stepgym.record.step import Step
from stepgym.run.episode import ENV_TURN

Lines: TypeAlias = Iterator[Text]

_CUT = 1200
"""Characters of one text that are shown unless all of it is asked for."""

_ROLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}
_RULE = 80


def header_lines(shown: Shown, *, full: bool = False) -> Lines:
    """What there is to know about the whole episode, one line each."""
    t = shown.trajectory
    yield _line(plain(str(t.id)) + ("" if t.final else "  (not final: repeated, never counted)"), "bold")
    detail = f" ({plain(t.outcome_detail)})" if t.outcome_detail else ""
    yield _pair("outcome", f"{t.outcome}{detail}", "green" if t.success else "red" if not t.outcome.scored else "")
    success = {None: "unknown", True: "yes", False: "no"}[t.success]
    low, high = t.reward_range
    yield _pair("reward", f"{_number(t.reward)}{_parts(t.reward_parts)}  success {success}  range {low:g} to {high:g}")
    yield _pair("group", _group(shown))
    values = shown.advantages
    if values is None:
        yield _pair("advantage", shown.advantage_note)
    else:
        alike = len(set(values)) <= 1
        listed = f"{values[0]:+.4f}" if values and alike else ", ".join(f"{value:+.4f}" for value in values)
        yield _pair("advantage", f"{listed or 'no steps'}  ({shown.advantage_note})")
    answer = "" if t.task.get("answer") is None else f"  answer {_json(t.task.get('answer'), full)}"
    yield _pair("task", f"{_json(t.task.get('id'), full)}{answer}")
    yield _pair("env", f"{plain(t.env_id) or 'unknown'}  {_json(t.env_config, full)}")
    if t.tools:
        names = [str((tool.get("function") or {}).get("name", "?")) for tool in t.tools]
        yield _pair("tools", plain(", ".join(names)))
    yield _pair("seeds", "  ".join(f"{plain(name)} {seed}" for name, seed in t.seeds.items()) or "unknown")
    yield _pair("made by", "  ".join(f"{plain(k)} {_bare(v)}" for k, v in t.provenance.items()) or "unknown")
    sampled = sum(len(step.response_ids) for step in t.steps if step.response_ids is not None)
    sent = sum(len(step.prompt_ids) for step in t.steps if step.prompt_ids is not None)
    wall = f", {t.metrics['wall_s']:.1f} s" if "wall_s" in t.metrics else ""
    yield _pair("size", f"{len(t.steps)} steps, {sent:,} tokens sent, {sampled:,} sampled{wall}")
    if t.error:
        last = t.error.strip().splitlines()[-1]
        yield from _text_lines(t.error if full else last, full, "red", indent="error       ")


def conversation_lines(shown: Shown, *, full: bool = False) -> Lines:
    """The conversation: before each turn what was new to the model, then what it said and what that came to."""
    steps = shown.trajectory.steps
    for index, step in enumerate(steps):
        if index and step.follows != index - 1:
            yield _line("")
            origin = "begins a conversation" if step.follows is None else f"goes on from step {step.follows}"
            yield _line(f"step {index} {origin}", "bold blue")
        for message in step.new_messages:
            yield from _message_lines(message, full)
        seen = _tokens_seen(shown, step)
        if seen is not None:
            yield _line(
                f"(the model saw no more than its first {seen:,} tokens: max_observation_tokens; --tokens shows them)",
                "dim",
            )
        yield _line("")
        yield step_line(shown, index)
        yield from _answer_lines(step, full)


def token_lines(step: Step, texts: TokenTexts | None, kept: int, advantage: float | None, *, full: bool) -> Lines:
    """The tokens of one step, a line each: those of the prompt that are new, then those of the response.

    Args:
        step: A step with ids.
        texts: Texts of tokens by id; None shows ids only.
        kept: Tokens of the prompt that an earlier step has already.
        advantage: Of the step, where it is known.
        full: The whole prompt, kept tokens included.
    """
    prompt, response, mask = step.prompt_ids, step.response_ids, step.loss_mask
    assert prompt is not None
    assert response is not None
    assert mask is not None  # a step with ids always has one
    yield _line(f"{'position':>8} {'id':>7} {'sampled':>7} {'logprob':>9} {'reward':>8} {'advantage':>9}  text", "bold")
    start = 0 if full else kept
    if start:
        yield _line(f"{'':>8} … {start:,} tokens as in an earlier step (--full shows all)", "dim")
    for position in range(start, len(prompt)):
        token = int(prompt[position])
        yield _line(f"{position:>8} {token:>7} {'–':>7} {'–':>9} {'–':>8} {'–':>9}  {_token(texts, token)}", "dim")
    for place, token in enumerate(response.tolist()):
        logprob = None if step.logprobs is None else float(step.logprobs[place])
        sampled = bool(mask[place])
        reward = f"{step.reward:.4g}" if place == len(response) - 1 else "–"
        given = f"{advantage:+.4f}" if advantage is not None and sampled else "–"
        yield _line(
            f"{len(prompt) + place:>8} {token:>7} {'yes' if sampled else 'no':>7} "
            f"{'–' if logprob is None else format(logprob, '.4f'):>9} {reward:>8} {given:>9}  {_token(texts, token)}",
            _heat(logprob) if sampled else "dim",
        )


def step_line(shown: Shown, index: int) -> Text:
    """One line about a turn: what it was, how it ended, how its prompt came about, reward, lengths, weights."""
    step = shown.trajectory.steps[index]
    turn = step.metrics.get(ENV_TURN)
    parts = [f"step {index}", f"turn {int(turn)}" if turn is not None else "not given to the environment"]
    parts += [plain(step.status), f"finish {plain(step.finish_reason)}"]
    if step.rendering:
        parts.append(plain(step.rendering))
    if step.prompt_ids is not None and step.response_ids is not None:
        parts.append(f"{len(step.prompt_ids):,} + {len(step.response_ids):,} tokens")
    else:
        parts.append("no ids (its engine speaks only chat)")
    parts.append(f"reward {step.reward:.4g}{_parts(step.reward_parts)}")
    if shown.advantages is not None:
        parts.append(f"advantage {shown.advantages[index]:+.4f}")
    if step.sampler != "policy":
        parts.append(plain(step.sampler))
    if step.weights_versions:
        spans = step.weights_versions
        one = len(spans) == 1
        listed = plain(spans[0][0]) if one else ", ".join(f"{plain(v)} [{start}:{end}]" for v, start, end in spans)
        parts.append(f"weights {listed}")
    style = "bold green" if step.status == "ok" else "bold red"
    return _rule("assistant · " + " · ".join(parts), style)


# ---- inside -------------------------------------------------------------------------------------------------------


def _message_lines(message: Mapping[str, Any], full: bool) -> Lines:
    role = str(message.get("role", "?"))
    name = f" {plain(str(message['tool_call_id']))}" if message.get("tool_call_id") else ""
    yield _line("")
    yield _rule(plain(role) + name, _ROLES.get(role, "white"))
    yield from _text_lines(_content(message), full)
    yield from _call_lines(message)


def _tokens_seen(shown: Shown, step: Step) -> int | None:
    """Tokens of an observation in an open turn that is as long as one may be; None for all others."""
    most = shown.trajectory.provenance.get("max_observation_tokens")
    steps, follows = shown.trajectory.steps, step.follows
    if step.rendering not in OPEN_TURN or most is None or follows is None or not 0 <= follows < len(steps):
        return None
    before = steps[follows]
    if step.prompt_ids is None or before.prompt_ids is None:
        return None
    seen = len(step.prompt_ids) - before.length + (step.rendering == "turn_reopened")
    return seen if seen == most else None


def _answer_lines(step: Step, full: bool) -> Lines:
    message = step.message
    if message is None:
        yield _line("(the record has no message)", "dim")
        return
    text = message.get("text")
    reasoning = message.get("reasoning_content")
    if not isinstance(text, str) or (not text and reasoning):
        text = _content(message)
        if reasoning:
            yield from _text_lines(str(reasoning), full, "dim", indent="thinking  ")
    if not text and not message.get("tool_calls"):
        yield _line("(nothing)", "dim")
    yield from _text_lines(text, full)
    yield from _call_lines(message)


def _call_lines(message: Mapping[str, Any]) -> Lines:
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        name, arguments = function.get("name", "?"), function.get("arguments", "")
        said = arguments if isinstance(arguments, str) else dump_json(arguments)
        yield _line(f"  calls {plain(str(name))}({plain(shortened(said, _CUT))})", "bold")
    for call in message.get("invalid_tool_calls") or ():
        error = call.get("error", call) if isinstance(call, Mapping) else call
        yield _line(f"  call that does not parse: {plain(shortened(str(error), _CUT))}", "red")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else dump_json(content)


def _text_lines(text: str, full: bool, style: str = "", *, indent: str = "") -> Lines:
    shown = text if full else shortened(text, _CUT)
    for line in plain(shown, lines=True).split("\n") if shown else ():
        yield _line(indent + line, style)
        indent = " " * len(indent)


def _group(shown: Shown) -> str:
    """The rewards of the final attempts by sample, this trajectory's marked."""
    own = shown.trajectory.id
    parts = []
    for sibling in shown.group:
        this = (sibling.sample, sibling.attempt) == (own.sample, own.attempt)
        if not (sibling.final or this):
            continue
        value = sibling.outcome if sibling.reward is None else f"{sibling.reward:.4g}"
        parts.append(f"[{value}]" if this else value)
    repeated = sum(not sibling.final for sibling in shown.group)
    again = f"  ({repeated} attempts were repeated)" if repeated else ""
    return f"rewards {' '.join(parts)}{again}"


def _token(texts: TokenTexts | None, token: int) -> str:
    if texts is None:
        return ""
    return f'"{plain(texts[token])}"'


def _heat(logprob: float | None) -> str:
    """Colour of a sampled token: the less likely it was, the hotter."""
    if logprob is None or logprob > -1.0:
        return "green"
    return "yellow" if logprob > -4.0 else "bold red"


def _parts(parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{plain(name)} {value:.4g}" for name, value in parts.items())
    return f" ({listed})" if listed else ""


def _number(value: float | None) -> str:
    return "none (could not be scored)" if value is None else f"{value:.4g}"


def _bare(value: Any) -> str:
    return plain(value) if isinstance(value, str) else _json(value, full=True)


def _json(value: Any, full: bool) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return plain(text if full else shortened(text, _CUT // 4))


def _pair(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<11} ", "dim"), (value, style))


def _rule(title: str, style: str) -> Text:
    return _line(f"── {title} " + "─" * max(0, _RULE - len(title) - 4), style)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style)


def all_lines(
    shown: Shown, *, full: bool, tokens: bool = False, texts: TokenTexts | None = None, kept: Sequence[int] = ()
) -> Lines:
    """Everything: the header, and the conversation or, with `tokens`, each step's tokens."""
    yield from header_lines(shown, full=full)
    if not tokens:
        yield from conversation_lines(shown, full=full)
        return
    for index, step in enumerate(shown.trajectory.steps):
        yield _line("")
        yield step_line(shown, index)
        if step.prompt_ids is None:
            yield from _answer_lines(step, full)
            continue
        advantage = shown.advantages[index] if shown.advantages is not None else None
        yield from token_lines(step, texts, kept[index], advantage, full=full)
